// Package httpload is a crowd of HTTP connections that costs little enough to leave the cores to the servers.
package httpload

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"stampede/internal/retry"
)

// Load is a crowd of connections. Without a Rate it is a closed loop: each of them sends a request
// as soon as the last one was answered. With one it is an open loop: requests are due on a schedule
// that does not wait for answers, and how long one took counts from the moment it was due, so that a
// server which falls behind cannot hide it. It writes and reads HTTP/1.1 by hand: net/http's client
// would cost more than the server under test, and they share the cores.
type Load struct {
	Addrs       []string // host:port of each server; the connections take turns
	Connections int
	For         time.Duration
	// Rate is how many requests are due in a second; 0 makes the loop a closed one.
	Rate float64
	// Most bounds how many requests there are; 0 sets no bound.
	Most uint64
	// Request appends the nth request of all, head and body; the first one is 1.
	Request func(dst []byte, n uint64) []byte
	// Status is the status that is wanted; 0 is any of 200 to 299. How long other answers take is not
	// measured, or a server that fails fast would look good.
	Status int
	// Heard, if set, is called for every answer by the goroutine of its connection. It may keep no part
	// of the body.
	Heard func(n uint64, status int, body []byte)
}

// answerPatience is how much longer than the load itself an answer may take.
const answerPatience = 15 * time.Second

// Measure sends the load. Connections that break are counted and not opened again; the error is of those
// that could not be opened, or of an answer that is no HTTP. It ends early with ctx.
func (l Load) Measure(ctx context.Context) (Answers, error) {
	conns, err := l.dial(ctx)
	defer func() {
		for _, conn := range conns {
			_ = conn.Close()
		}
	}()
	if err != nil {
		return Answers{}, err
	}
	r := newRun(ctx, l, len(conns))
	var wg sync.WaitGroup
	for i, conn := range conns {
		wg.Go(func() { r.tallies[i].err = r.serve(conn, &r.tallies[i]) })
	}
	wg.Wait()
	return r.sum()
}

func (l Load) dial(ctx context.Context) ([]net.Conn, error) {
	var conns []net.Conn
	for i := range l.Connections {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", l.Addrs[i%len(l.Addrs)])
		if err != nil {
			return conns, err
		}
		conns = append(conns, conn)
	}
	return conns, nil
}

// run is a load under way.
type run struct {
	load Load
	ctx  context.Context
	// No request is due after the deadline. An open loop that is behind goes on with those that were due
	// before, until it gives up on the rest.
	began, deadline, giveUp time.Time
	taken                   atomic.Uint64 // requests that a connection has taken upon itself
	tallies                 []tally       // one for each connection
}

func newRun(ctx context.Context, l Load, connections int) *run {
	began := time.Now()
	return &run{
		load: l, ctx: ctx, began: began, deadline: began.Add(l.For), giveUp: began.Add(2 * l.For),
		tallies: make([]tally, connections),
	}
}

// serve sends requests over one connection until there are no more to send.
func (r *run) serve(conn net.Conn, t *tally) error {
	// Fails on a connection that broke, and so will the first write.
	_ = conn.SetDeadline(r.giveUp.Add(answerPatience))
	in := bufio.NewReaderSize(conn, answerBytes)
	var out []byte
	for {
		n, due, ok := r.next()
		if !ok {
			return nil
		}
		out = r.load.Request(out[:0], n)
		if _, err := conn.Write(out); err != nil {
			t.broken++
			return nil //nolint:nilerr // it is counted
		}
		status, length, err := readHead(in)
		var body []byte
		if err == nil {
			body, err = in.Peek(length)
		}
		switch {
		case errors.Is(err, errNotHTTP), errors.Is(err, bufio.ErrBufferFull):
			return err
		case err != nil:
			t.broken++
			return nil //nolint:nilerr // it is counted
		}
		now := time.Now()
		t.add(r.load.wants(status), !now.After(r.deadline), status, now.Sub(due))
		if r.load.Heard != nil {
			r.load.Heard(n, status, body)
		}
		_, _ = in.Discard(length) // it is in the buffer
	}
}

// next waits for the moment in which another request is to be sent, and returns when it was due.
func (r *run) next() (n uint64, due time.Time, ok bool) {
	now := time.Now()
	end := r.deadline
	if r.load.Rate > 0 {
		end = r.giveUp
	}
	if r.ctx.Err() != nil || !now.Before(end) {
		return 0, now, false
	}
	n = r.taken.Add(1)
	if r.load.Rate == 0 {
		return n, now, r.load.Most == 0 || n <= r.load.Most
	}
	if n > r.scheduled() {
		return 0, now, false
	}
	due = r.due(n)
	return n, due, retry.Pause(due.Sub(now), r.ctx.Done())
}

// scheduled is how many requests an open loop has.
func (r *run) scheduled() uint64 {
	all := uint64(r.load.Rate * r.load.For.Seconds())
	if r.load.Most > 0 {
		all = min(all, r.load.Most)
	}
	return all
}

func (r *run) due(n uint64) time.Time {
	return r.began.Add(time.Duration(float64(n-1) / r.load.Rate * float64(time.Second)))
}

func (l Load) wants(status int) bool {
	if l.Status == 0 {
		return status >= 200 && status <= 299
	}
	return status == l.Status
}

// answerBytes is more than any answer of a purchase has.
const answerBytes = 4 << 10

var errNotHTTP = errors.New("httpload: not an answer that this client can read")

// readHead reads the head of an answer, and returns its status and the length of its body.
func readHead(in *bufio.Reader) (status, length int, err error) {
	line, err := in.ReadSlice('\n')
	if err != nil {
		return 0, 0, err
	}
	if len(line) < 12 || !bytes.HasPrefix(line, []byte("HTTP/1.1 ")) {
		return 0, 0, fmt.Errorf("%w: %q", errNotHTTP, line)
	}
	if status, err = strconv.Atoi(string(line[9:12])); err != nil {
		return 0, 0, fmt.Errorf("%w: %q", errNotHTTP, line)
	}
	for {
		if line, err = in.ReadSlice('\n'); err != nil {
			return 0, 0, err
		}
		if len(line) <= 2 {
			return status, length, nil
		}
		if value, ok := bytes.CutPrefix(line, []byte("Content-Length: ")); ok {
			if length, err = strconv.Atoi(string(bytes.TrimSpace(value))); err != nil {
				return 0, 0, fmt.Errorf("%w: %q", errNotHTTP, line)
			}
		} else if bytes.HasPrefix(line, []byte("Transfer-Encoding: ")) {
			return 0, 0, fmt.Errorf("%w: %q", errNotHTTP, line)
		}
	}
}
