package main

import (
	"embed"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/alecthomas/kong"

	"stampede/reservation/order"
)

// negative is what begins like a negative number, or like a time before now.
var negative = regexp.MustCompile(`^-[0-9]`)

// arranged returns the words of a command line in the order that kong reads: flags in front of a command follow it,
// "help" is --help, and negative numbers are not read as flags.
func arranged(node *kong.Node, args []string) []string {
	var command, flags []string
	for isValue := false; len(node.Children) > 0 && len(args) > 0; args = args[1:] {
		word := args[0]
		child := subcommand(node, word)
		switch {
		case child != nil:
			node, command, isValue = child, append(command, word), false
		case isValue:
			flags[len(flags)-1] += "=" + word
			isValue = false
		case word == "help":
			flags = append(flags, "--help")
		case strings.HasPrefix(word, "-") && word != "--":
			flags = append(flags, word)
			isValue = strings.HasPrefix(word, "--") && !strings.Contains(word, "=")
		default:
			return slices.Concat(command, args, flags) // no command, which is what kong then says
		}
	}
	var numbers []string
	for i, word := range args {
		last := len(flags) - 1
		switch {
		case word == "--":
			return slices.Concat(command, flags, []string{"--"}, numbers, args[i+1:])
		case !negative.MatchString(word):
			flags = append(flags, word)
		case last >= 0 && strings.HasPrefix(flags[last], "--") && !strings.Contains(flags[last], "="):
			flags[last] += "=" + word
		default:
			numbers = append(numbers, word)
		}
	}
	if len(numbers) > 0 {
		numbers = append([]string{"--"}, numbers...)
	}
	return slices.Concat(command, flags, numbers)
}

// unparsed returns the usage error for an error of kong, with details that kong leaves out.
func unparsed(err error) error {
	var parse *kong.ParseError
	if !strings.HasPrefix(err.Error(), "missing flags: ") || !errors.As(err, &parse) {
		return &usageError{err}
	}
	var missing []string
	for _, flag := range parse.Context.Flags() {
		if flag.Required && !flag.Set {
			missing = append(missing, fmt.Sprintf("%s (or %s)", flag.Summary(), strings.Join(flag.Envs, ", ")))
		}
	}
	return usagef("missing flags: %s", strings.Join(missing, ", "))
}

// addresses makes kong check every flag of the type addr: HOST:PORT, or empty for none.
var addresses = kong.NamedMapper("addr", kong.MapperFunc(func(c *kong.DecodeContext, target reflect.Value) error {
	var addr string
	if err := c.Scan.PopValueInto("address", &addr); err != nil {
		return err
	}
	target.SetString(addr)
	return checkAddr(addr)
}))

func checkAddr(addr string) error {
	if addr == "" {
		return nil
	}
	_, port, err := net.SplitHostPort(addr)
	if err == nil {
		_, err = net.LookupPort("tcp", port)
	}
	if err != nil || port == "" {
		return usagef("%q is not an address: want HOST:PORT, such as 127.0.0.1:8080, or :8080 for all addresses", addr)
	}
	return nil
}

// otherVariables are read by compose files, tests and tools, and by no command.
var otherVariables = []string{
	"STAMPEDE_BIND", "STAMPEDE_PORT", "STAMPEDE_DASHBOARD_PORT", "STAMPEDE_PROMETHEUS_PORT", "STAMPEDE_GRAFANA_PORT",
	"STAMPEDE_VERSION", "STAMPEDE_REVISION", "STAMPEDE_CLUSTER_NET", "STAMPEDE_CRASH_AT", "STAMPEDE_FREEZE_AT",
}

// foreign are variables with our prefix that others make: Kubernetes for each service whose name begins with stampede,
// and our tests.
var foreign = regexp.MustCompile(`_(SERVICE_(HOST|PORT)|PORT)(_|$)|^STAMPEDE_(TEST|BENCH)_`)

const (
	strayMax = 5 // warnings of one command
	nearMax  = 4 // the distance of a misspelled name
)

// warnOfStrays names variables that begin with STAMPEDE_ and that no command reads, which may be misspelled.
func warnOfStrays(stderr io.Writer, program *kong.Node) {
	known := slices.Concat(otherVariables, secretFiles)
	_ = kong.Visit(program, func(node kong.Visitable, next kong.Next) error {
		if flag, ok := node.(*kong.Flag); ok {
			known = append(known, flag.Envs...)
		}
		return next(nil)
	})
	warned := 0
	for _, variable := range os.Environ() {
		name, value, _ := strings.Cut(variable, "=")
		if !strings.HasPrefix(name, "STAMPEDE_") || value == "" || slices.Contains(known, name) ||
			foreign.MatchString(name) || warned == strayMax {
			continue
		}
		warned++
		nearest := slices.MinFunc(known, func(a, b string) int { return distance(name, a) - distance(name, b) })
		hint := ""
		if distance(name, nearest) <= nearMax {
			hint = ": did you mean " + nearest + "?"
		}
		_, _ = fmt.Fprintf(stderr, "stampede: no command reads the variable %s%s\n", printable(name), hint)
	}
}

// distance is the number of letters to insert, delete or replace to make b of a (Levenshtein).
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		before := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := before
			if a[i] != b[j] {
				cost++
			}
			before, row[j+1] = row[j+1], min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// memberFlags are the flags of members of the API that have other names; "_seconds" is left out without it.
var memberFlags = map[string]string{"items": "item", "parties": "party", "entries_sale_id": "entries"}

var member = regexp.MustCompile(`\b([a-z_]+)((?:\[\d+\])?(?:\.[a-z_]+)?)( must| needs)|\b([a-z]+(?:_[a-z]+)+)\b`)

// flagError is an error that names the flags of the command.
type flagError struct {
	error
	text string
}

func (e *flagError) Error() string { return e.text }
func (e *flagError) Unwrap() error { return e.error }

// withFlags names flags where an error about invalid input names members of the API, which people at a command line do
// not know.
func withFlags(command *kong.Node, err error) error {
	if _, invalid := errors.AsType[*order.InvalidError](err); !invalid {
		return err
	}
	flags := map[string]bool{}
	for _, flag := range command.Flags {
		flags[flag.Name] = true
	}
	return &flagError{err, member.ReplaceAllStringFunc(err.Error(), func(found string) string {
		parts := member.FindStringSubmatch(found)
		name := parts[1] + parts[4]
		flag := memberFlags[name]
		if flag == "" {
			flag = strings.ReplaceAll(strings.TrimSuffix(name, "_seconds"), "_", "-")
		}
		if !flags[flag] {
			return found
		}
		return "--" + flag + parts[2] + parts[3]
	})}
}

// completeCmd prints what can stand in the place of the last word, one a line, with a tab and a description behind it;
// or :files or :dirs.
type completeCmd struct {
	Words []string `arg:"" optional:"" passthrough:"" help:"Words behind the name of the program; the last one is completed."`
}

func (c *completeCmd) Run(s *streams) error {
	words := c.Words
	if len(words) > 0 && words[0] == "--" {
		words = words[1:]
	}
	for _, candidate := range complete(newParser(&cli{}).Model.Node, words) {
		if _, err := fmt.Fprintln(s.out, candidate); err != nil {
			return err
		}
	}
	return nil
}

// complete follows the words into the tree of commands.
func complete(node *kong.Node, words []string) []string {
	if len(words) == 0 {
		words = []string{""}
	}
	words = joinedValues(words)
	before, word := words[:len(words)-1], words[len(words)-1]
	var waiting *kong.Flag // a flag whose value comes next
	arguments := 0
	for _, w := range before {
		switch child := subcommand(node, w); {
		case waiting != nil:
			waiting = nil
		case w == "--":
			return positional(node, arguments, word)
		case strings.HasPrefix(w, "-"):
			if waiting = flagNamed(node, w); waiting != nil && waiting.IsBool() {
				waiting = nil
			}
		case child != nil:
			node = child
		default:
			arguments++
		}
	}
	name, value, assigned := strings.Cut(word, "=")
	switch {
	case waiting != nil:
		return completeValue(waiting.Value, word, "")
	case strings.HasPrefix(word, "-") && assigned:
		flag := flagNamed(node, name)
		if flag == nil || flag.IsBool() {
			return nil
		}
		return completeValue(flag.Value, value, name+"=")
	case strings.HasPrefix(word, "-"):
		return completeFlags(node, word)
	}
	var found []string
	for _, child := range node.Children {
		if !child.Hidden && strings.HasPrefix(child.Name, word) {
			found = append(found, candidate(child.Name, child.Help))
		}
	}
	if len(node.Children) == 0 {
		return positional(node, arguments, word)
	}
	return found
}

// joinedValues undoes that bash makes three words of --flag=value, and --flag= of a flag in front of "=". The value is
// then a word of its own, which is what bash wants to have completed.
func joinedValues(words []string) (joined []string) {
	for i, w := range words {
		switch {
		case w != "=" || i == 0 || !strings.HasPrefix(words[i-1], "--"):
			joined = append(joined, w)
		case i == len(words)-1:
			joined = append(joined, "")
		}
	}
	return joined
}

func subcommand(node *kong.Node, name string) *kong.Node {
	for _, child := range node.Children {
		if child.Name == name {
			return child
		}
	}
	return nil
}

// flagNamed returns a flag of the command or one above it, as --name, -n or --name=value; nil if it has its value.
func flagNamed(node *kong.Node, word string) *kong.Flag {
	for _, group := range node.AllFlags(false) {
		for _, flag := range group {
			if word == "--"+flag.Name || flag.Short != 0 && word == "-"+string(flag.Short) {
				return flag
			}
		}
	}
	return nil
}

func completeFlags(node *kong.Node, prefix string) (found []string) {
	for _, group := range node.AllFlags(true) {
		for _, flag := range group {
			if name := "--" + flag.Name; strings.HasPrefix(name, prefix) {
				found = append(found, candidate(name, flag.Help))
			}
		}
	}
	return found
}

// positional completes the nth argument of a command.
func positional(node *kong.Node, n int, word string) []string {
	if n >= len(node.Positional) {
		return nil
	}
	return completeValue(node.Positional[n], word, "")
}

// completeValue completes a value that begins with word; before stands in front of it.
func completeValue(value *kong.Value, word, before string) (found []string) {
	placeholder := value.Tag.PlaceHolder
	switch {
	case value.Enum != "":
		for _, name := range strings.Split(value.Enum, ",") {
			if name != "" && strings.HasPrefix(name, word) {
				found = append(found, candidate(before+name, ""))
			}
		}
	case value.Tag.Type == "existingdir" || placeholder == "DIR":
		return []string{":dirs"}
	case value.Tag.Type == "existingfile" || placeholder == "FILE":
		return []string{":files"}
	}
	return found
}

// candidate has the first sentence of the help as its description.
func candidate(name, help string) string {
	first, _, _ := strings.Cut(help, ". ")
	return name + "\t" + strings.TrimSuffix(strings.Join(strings.Fields(first), " "), ".")
}

//go:embed completion/stampede.*
var completionScripts embed.FS

// completionCmd prints a small script, which asks completeCmd for each completion.
type completionCmd struct {
	Shell string `arg:"" enum:"bash,zsh,fish" help:"Shell: bash, zsh or fish."`
}

func (c *completionCmd) Run(s *streams) error {
	script, err := completionScripts.ReadFile("completion/stampede." + c.Shell)
	if err != nil {
		return err
	}
	_, err = s.out.Write(script)
	return err
}
