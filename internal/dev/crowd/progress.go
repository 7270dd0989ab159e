package crowd

import (
	"context"
	"fmt"
	"io"
	"time"

	"stampede/internal/figure"
)

// String returns the progress in one line, without the time.
func (p Progress) String() string {
	line := fmt.Sprintf("%s of %s buyers due  accepted %s  rejected %s",
		figure.Count(p.Due), figure.Count(p.Buyers), figure.Count(p.Accepted), figure.Count(p.Rejected))
	if p.Retries > 0 {
		line += "  retried " + figure.Count(p.Retries)
	}
	if p.Failed > 0 {
		line += "  failed " + figure.Count(p.Failed)
	}
	return line
}

// Done is closed when Run has returned.
func (c *Crowd) Done() <-chan struct{} { return c.done }

// ShowProgress prints the progress once a second while the crowd runs: on a terminal in one line that is
// overwritten, elsewhere one line each. It returns when Run does, or when ctx ends.
func (c *Crowd) ShowProgress(ctx context.Context, w io.Writer, terminal bool) {
	const eraseLine = "\r\x1b[K"
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-c.done:
			if terminal {
				_, _ = io.WriteString(w, eraseLine)
			}
			return
		case <-ctx.Done():
			return
		}
		p := c.Progress()
		line := fmt.Sprintf("%5.1f s  %s", p.Elapsed.Seconds(), p)
		if terminal {
			_, _ = io.WriteString(w, eraseLine+line)
		} else {
			_, _ = io.WriteString(w, line+"\n")
		}
	}
}
