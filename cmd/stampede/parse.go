package main

import (
	"errors"
	"fmt"
	"reflect"
	"strings"

	"github.com/alecthomas/kong"
	"github.com/google/uuid"
)

// saleIDs makes kong parse every UUID as a sale id: the command line has no other UUIDs.
var saleIDs = kong.TypeMapper(reflect.TypeFor[uuid.UUID](),
	kong.MapperFunc(func(c *kong.DecodeContext, target reflect.Value) error {
		var text string
		if err := c.Scan.PopValueInto("id", &text); err != nil {
			return err
		}
		id, err := uuid.Parse(text)
		if err != nil {
			return usagef("%q is not a sale id: want one like 01a1fef0-cb72-76d5-818b-64550bc6ed90, as sale list shows them",
				text)
		}
		target.Set(reflect.ValueOf(id))
		return nil
	}))

// unparsed returns the usage error for an error of kong, with details that kong leaves out.
func unparsed(err error) error {
	if number, found := strings.CutPrefix(err.Error(), "unknown flag -"); found && number[0] >= '0' && number[0] <= '9' {
		number, _, _ = strings.Cut(number, ",") // cut kong's suggestion of another flag
		return usagef("-%[1]s is parsed as a flag: write a negative number as -- -%[1]s", number)
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
