package main

import (
	"errors"
	"regexp"
	"strings"

	"github.com/alecthomas/kong"

	"stampede/reservation/order"
)

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
