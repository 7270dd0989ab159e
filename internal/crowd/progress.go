package crowd

import (
	"context"
	"fmt"
	"io"
	"time"
)

// String is one line of progress.
func (p Progress) String() string {
	line := fmt.Sprintf("%5.1f s  %s of %s buyers came  accepted %s  rejected %s",
		p.Elapsed.Seconds(), Count(p.Due), Count(p.Buyers), Count(p.Accepted), Count(p.Rejected))
	if p.Retries > 0 {
		line += "  retried " + Count(p.Retries)
	}
	if p.Failed > 0 {
		line += "  failed " + Count(p.Failed)
	}
	return line
}

// ShowProgress prints the progress once a second while the crowd runs: on a terminal one line,
// written over; elsewhere a line each. It returns when Run has, or when ctx ends.
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
		if terminal {
			_, _ = fmt.Fprint(w, eraseLine, c.Progress())
		} else {
			_, _ = fmt.Fprintln(w, c.Progress())
		}
	}
}
