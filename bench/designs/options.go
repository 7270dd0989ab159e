package designs

import (
	"fmt"
	"strconv"

	"stampede/bench/front"
)

// option is a whole number of at least 1 that the benchmark may set; the default is the best value
// found.
func option(b front.Backend, name string, best int) (int, error) {
	text, given := b.Options[name]
	if !given {
		return best, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		return 0, fmt.Errorf("option %s is %q, want a whole number of at least 1", name, text)
	}
	return n, nil
}
