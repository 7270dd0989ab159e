package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/user"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

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
