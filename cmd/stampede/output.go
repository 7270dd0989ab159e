package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/uuid"

	"stampede/internal/format"
)

// outputFlag is for commands that print a result. Errors are text on standard error, whatever the format.
type outputFlag struct {
	Output string `default:"text" enum:"text,json" placeholder:"FORMAT" help:"Format of the result on standard output: text or json (${default}). Messages and errors are text on standard error."`
}

func (f outputFlag) json() bool { return f.Output == "json" }

// print prints v as a line of JSON, or else the text.
func (f outputFlag) print(w io.Writer, v any, format string, a ...any) error {
	return f.write(w, v, func(w io.Writer) error {
		_, err := fmt.Fprintf(w, format, a...)
		return err
	})
}

// write prints v as a line of JSON, or else calls text.
func (f outputFlag) write(w io.Writer, v any, text func(io.Writer) error) error {
	if f.json() {
		return writeJSON(w, v)
	}
	return text(w)
}

// writeJSON prints v as one line of JSON: what every command prints with --output json.
func writeJSON(w io.Writer, v any) error { return json.NewEncoder(w).Encode(v) }

// writeAll prints the view of each as a line of JSON, or else calls text.
func writeAll[T, View any](
	f outputFlag, w io.Writer, all []T, view func(T) View, text func(io.Writer, []T) error,
) error {
	if !f.json() {
		return text(w, all)
	}
	for _, one := range all {
		if err := writeJSON(w, view(one)); err != nil {
			return err
		}
	}
	return nil
}

// asIs is the view of what is printed as it is.
func asIs[T any](v T) T { return v }

// verdict ends a command that has printed what is wrong, and what could not be checked. Err is that of the printing.
func verdict(err error, isBroken, isUnchecked bool) error {
	switch {
	case err != nil:
		return err
	case isBroken:
		return errBroken
	case isUnchecked:
		return errUnchecked
	}
	return nil
}

// table writes rows in aligned columns. Flush returns the errors of all.
type table struct{ *tabwriter.Writer }

func newTable(w io.Writer, header ...any) table {
	t := table{tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)}
	if len(header) > 0 {
		t.row(header...)
	}
	return t
}

func (t table) row(cells ...any) {
	_, _ = fmt.Fprintf(t, strings.TrimSuffix(strings.Repeat("%v\t", len(cells)), "\t")+"\n", cells...)
}

// printable makes what others wrote safe for a terminal: it may have any bytes.
func printable(text string) string { return format.Printable(text) }

// orDash is printable, with a dash for no text.
func orDash(text string) string {
	if text == "" {
		return "-"
	}
	return printable(text)
}

// idOrDash is the text of an id, with a dash for none.
func idOrDash(id uuid.UUID) string {
	if id == uuid.Nil {
		return "-"
	}
	return id.String()
}

// second is a time to the second, with a dash for none.
func second(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.UTC().Format(time.RFC3339)
}

// listedMax is how many members of a list details shows: a reconcile may have appended thousands of orders.
const listedMax = 3

// details returns the members of a JSON object for people, in the order of their names. Of a list it shows the first
// members and how many there are; --output json has all.
func details(data []byte) string {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(data, &members); err != nil {
		return printable(string(data))
	}
	var texts []string
	for _, name := range slices.Sorted(maps.Keys(members)) {
		value := printable(string(members[name]))
		var text string
		var list []json.RawMessage
		switch {
		case json.Unmarshal(members[name], &text) == nil:
			value = printable(text)
			if strings.ContainsAny(text, " ,=") {
				value = fmt.Sprintf("%q", text)
			}
		case json.Unmarshal(members[name], &list) == nil && len(list) > listedMax:
			first, _ := json.Marshal(list[:listedMax]) // they were JSON
			value = fmt.Sprintf("%s… (%s in all)", printable(strings.TrimSuffix(string(first), "]")), format.Count(len(list)))
		}
		texts = append(texts, name+"="+value)
	}
	return strings.Join(texts, " ")
}

// operatorFlag is for commands whose change is recorded with who made it.
type operatorFlag struct {
	Operator string `env:"STAMPEDE_OPERATOR" placeholder:"NAME" help:"Who makes the change, recorded with it (default: cli: and the user of the system)."`
}

const maxOperatorBytes = 200

// name returns the operator, or a usage error for a name that a log could not show.
func (f operatorFlag) name() (string, error) {
	valid := len(f.Operator) <= maxOperatorBytes && utf8.ValidString(f.Operator) &&
		!strings.ContainsFunc(f.Operator, unicode.IsControl)
	err := checkFlag(valid, "--operator", strconv.Quote(f.Operator), "at most 200 bytes without control characters")
	if err != nil {
		return "", err
	}
	if name := strings.TrimSpace(f.Operator); name != "" {
		return name, nil
	}
	// A container may run as a user without a name.
	if u, err := user.Current(); err == nil && u.Username != "" {
		return "cli:" + u.Username, nil
	}
	return "cli:" + strconv.Itoa(os.Getuid()), nil
}

// yesFlag is for commands that cannot be undone.
type yesFlag struct {
	Yes bool `short:"y" env:"STAMPEDE_YES" help:"Do it without asking, though it cannot be undone. Needed where standard input is no terminal."`
}

// errDeclined ends a command whose question was not answered with yes.
var errDeclined = errors.New("not confirmed; nothing was done")

// askable returns a usage error if the command was given neither --yes nor a terminal on which it can ask. Commands
// call it before anything else.
func (f yesFlag) askable(s *streams) error {
	if f.Yes || isTerminal(s.in) && isTerminal(s.err) {
		return nil
	}
	return usagef("this cannot be undone, and there is no terminal to ask on: add --yes (STAMPEDE_YES); nothing was done")
}

// confirm asks on the terminal whether to go on, unless --yes was given. Question names what would happen; it is called
// only if it is asked.
func (f yesFlag) confirm(ctx context.Context, s *streams, question func() (string, error)) error {
	if f.Yes {
		return nil
	}
	if err := f.askable(s); err != nil {
		return err
	}
	text, err := question()
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(s.err, "%s\nThis cannot be undone. Go on? [y/N] ", text); err != nil {
		return err
	}
	answer, err := readLine(ctx, s.in)
	if err != nil {
		_, _ = fmt.Fprintln(s.err)
		return fmt.Errorf("%w: %w", errDeclined, err)
	}
	switch strings.ToLower(strings.TrimSpace(answer)) {
	case "y", "yes":
		return nil
	}
	return errDeclined
}

// readLine returns at the end of ctx, too. A read from a terminal cannot be stopped; the process ends soon after.
func readLine(ctx context.Context, r io.Reader) (string, error) {
	type read struct {
		line string
		err  error
	}
	done := make(chan read, 1)
	go func() {
		line, err := bufio.NewReader(r).ReadString('\n')
		done <- read{line, err}
	}()
	select {
	case got := <-done:
		return got.line, got.err
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
}
