package ingress

import (
	"context"
	"sync"
	"time"
)

// patience is the context of a request with a time-out, whose timer starts when somebody first waits
// for it. Most of a crowd is told "sold out", for which nobody waits, and a timer for each of them
// costs a noticeable part of that answer. It is safe for concurrent use.
type patience struct {
	request context.Context
	length  time.Duration

	first  sync.Once
	ctx    context.Context
	cancel context.CancelFunc
}

// ended is what a patience that nobody has used becomes when it ends.
var ended = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

func (p *patience) waiting() context.Context {
	p.first.Do(func() { p.ctx, p.cancel = context.WithTimeout(p.request, p.length) })
	return p.ctx
}

// end frees the timer, if it runs.
func (p *patience) end() {
	p.first.Do(func() { p.ctx, p.cancel = ended, func() {} })
	p.cancel()
}

// Deadline implements context.Context, as do the following.
func (p *patience) Deadline() (time.Time, bool) { return p.waiting().Deadline() }
func (p *patience) Done() <-chan struct{}       { return p.waiting().Done() }
func (p *patience) Err() error                  { return p.waiting().Err() }
func (p *patience) Value(key any) any           { return p.waiting().Value(key) }
