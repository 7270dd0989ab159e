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
// nearly all of a page together and in order, so one goroutine serves them all; one for each would
// cost a worker a sixth of its time. It waits for the first entry and checks the others
// periodically, so that none waits long for another. A refused entry gets its own goroutine.
func (s *subscription) followPage(page <-chan *delivery) {
	var open []*delivery
	delay := followDelay
	look := time.NewTimer(delay)
	defer look.Stop()
	for {
		if len(open) == 0 {
			d, more := <-page
			if !more {
				return
			}
			open = append(open, d)
		}
		looked := false
		select {
		case <-open[0].msg.Acked():
			// The handlers of its batch are about to ack as well: yield, and wake up once for all.
			runtime.Gosched()
		case <-open[0].msg.Nacked():
		case <-look.C:
			looked = true
		case <-s.ctx.Done():
			s.followEach(open, page)
			return
		}
		open = appendReady(open, page)
		if !looked {
			front := slices.IndexFunc(open, func(d *delivery) bool { return !s.settled(d) })
			if front < 0 {
				front = len(open)
			}
			open = open[front:]
			continue
		}
		before := len(open)
		open = slices.DeleteFunc(open, s.settled)
		if delay = min(2*delay, followDelayMax); len(open) < before {
			delay = followDelay
		}
		look.Reset(delay)
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

// settled reports whether the delivery needs no more waiting, and starts what follows.
func (s *subscription) settled(d *delivery) bool {
	select {
	case <-d.msg.Acked():
		d.settled()
		s.Acks.Add(d.id)
		return true
	case <-d.msg.Nacked():
		s.following.Go(func() { s.follow(d) })
		return true
	default:
		return false
	}
}
