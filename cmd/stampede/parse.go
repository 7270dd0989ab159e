package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/alecthomas/kong"
)

// unparsed is the usage error for a command line that kong could not take, with what kong leaves out.
func unparsed(err error) error {
	if number, found := strings.CutPrefix(err.Error(), "unknown flag -"); found && number[0] >= '0' && number[0] <= '9' {
		number, _, _ = strings.Cut(number, ",") // what follows is a guess at another flag
		return usagef("-%[1]s is taken for a flag: where a number may be below zero, write it as -- -%[1]s", number)
	}
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
