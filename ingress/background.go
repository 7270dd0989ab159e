package ingress

import (
	"context"
	"sync"
)

// background is the goroutines that a server runs beside its requests. They end with ctx, and stop waits for them.
type background struct {
	ctx    context.Context
	cancel context.CancelFunc

	// mu keeps stop and the start of another one apart.
	mu      sync.Mutex
	running sync.WaitGroup
}

func newBackground() *background {
	ctx, cancel := context.WithCancel(context.Background())
	return &background{ctx: ctx, cancel: cancel}
}

// start runs f, unless stop was called before.
func (b *background) start(f func(context.Context)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ctx.Err() == nil {
		b.running.Go(func() { f(b.ctx) })
	}
}

func (b *background) stop() {
	b.mu.Lock()
	b.cancel()
	b.mu.Unlock()
	b.running.Wait()
}
