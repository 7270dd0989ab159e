package main

import (
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
