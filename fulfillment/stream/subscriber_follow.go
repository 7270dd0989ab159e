package stream

import (
	"runtime"
	"slices"
	"time"
)

// The waits for the first entry of a page before the others are checked as well.
const (
	followDelay    = 20 * time.Millisecond
	followDelayMax = 320 * time.Millisecond
)

// followPage waits until the entries of a page are settled. Handlers that work in batches settle
// nearly all of a page together and in order, so one goroutine serves them all; one for each
// would cost a sixth of a worker's time. It waits for the first entry and checks the others
// periodically, so that none waits long for another. A refused entry gets its own goroutine.
func (s *subscription) followPage(page <-chan *delivery) {
	var open []*delivery
	delay := followDelay
	check := time.NewTimer(delay)
	defer check.Stop()
	for {
		if len(open) == 0 {
			d, more := <-page
			if !more {
				return
			}
			open = append(open, d)
		}
		checkAll := false
		select {
		case <-open[0].msg.Acked():
			// The other handlers of its batch are about to ack: yield, to wake up once for all of them.
			runtime.Gosched()
		case <-open[0].msg.Nacked():
		case <-check.C:
			checkAll = true
		case <-s.ctx.Done():
			s.followEach(open, page)
			return
		}
		open = appendReady(open, page)
		if !checkAll {
			front := slices.IndexFunc(open, func(d *delivery) bool { return !s.handleSettled(d) })
			if front < 0 {
				front = len(open)
			}
			open = open[front:]
			continue
		}
		remaining := len(open)
		open = slices.DeleteFunc(open, s.handleSettled)
		if delay = min(2*delay, followDelayMax); len(open) < remaining {
			delay = followDelay
		}
		check.Reset(delay)
	}
}

// followEach gives each open entry its own goroutine when the page's is to end.
func (s *subscription) followEach(open []*delivery, page <-chan *delivery) {
	for _, d := range open {
		s.follow(d)
	}
	for d := range page {
		s.follow(d)
	}
}

// appendReady appends the deliveries that are available without waiting.
func appendReady(open []*delivery, page <-chan *delivery) []*delivery {
	for {
		select {
		case d, more := <-page:
			if !more {
				return open
			}
			open = append(open, d)
		default:
			return open
		}
	}
}

// handleSettled returns false if the message is not settled yet. Otherwise it acknowledges the entry,
// or starts its redelivery.
func (s *subscription) handleSettled(d *delivery) bool {
	select {
	case <-d.msg.Acked():
		d.cancel()
		s.acks.add(d.id)
		return true
	case <-d.msg.Nacked():
		s.following.Go(func() { s.follow(d) })
		return true
	default:
		return false
	}
}
