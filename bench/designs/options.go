package designs

import (
	"fmt"
	"strconv"

	"stampede/bench/front"
)

// option is a whole number, at least 1, that the benchmark may set: what was found best if it does not.
func option(b front.Backend, name string, best int) (int, error) {
	text, given := b.Options[name]
	if !given {
		return best, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		return 0, fmt.Errorf("option %s is %q, want a number from 1", name, text)
	}
	return n, nil
}
