package reservation

import (
	"errors"
	"sync"
)

// each calls do with the numbers from 0 to n-1, at the same time, and returns all errors.
func each(n int, do func(i int) error) error {
	failed := make([]error, n)
	var doing sync.WaitGroup
	for i := range failed {
		doing.Go(func() { failed[i] = do(i) })
	}
	doing.Wait()
	return errors.Join(failed...)
}
