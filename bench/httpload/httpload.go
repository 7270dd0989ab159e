// Package httpload sends HTTP requests over many connections with little CPU, which leaves the cores to
// the servers.
package httpload

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"stampede/internal/retry"
)

// Load is a set of connections. Without a Rate it is a closed loop: each connection sends a request as
// soon as the last one was answered. With a Rate it is an open loop: requests are due on a schedule
// that does not wait for answers, and latencies count from the due time, so a server that falls behind
// cannot hide it. Load writes and reads HTTP/1.1 itself: net/http's client would cost more than the
// server under test, and they share the cores.
type Load struct {
	Addrs       []string // host:port of each server; the connections take turns
	Connections int
	For         time.Duration
	// Rate is the number of requests due per second; 0 means a closed loop.
	Rate float64
	// Most is the maximum of requests; 0 means no limit.
	Most uint64
	// Request appends the nth request, head and body; the first one is 1.
	Request func(dst []byte, n uint64) []byte
	// Status is the wanted status; 0 means any of 200 to 299. The latency of other answers is not
	// measured, or a server that fails fast would look good.
	Status int
	// OnAnswer, if set, is called for every answer by the goroutine of its connection. It must not keep
	// body.
	OnAnswer func(n uint64, status int, body []byte)
}

// answerGrace is how long answers are awaited after the end of the load.
const answerGrace = 15 * time.Second

// Measure sends the load. Broken connections are counted and not reopened; it fails if
// a connection cannot be opened, or an answer is not readable as HTTP. It ends early
// with ctx.
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

// run is a load in progress.
type run struct {
	load Load
	ctx  context.Context
	// No request is due after the deadline. An open loop that is late continues with requests that were
	// due before, until giveUp.
	began, deadline, giveUp time.Time
	taken                   atomic.Uint64 // requests taken by a connection
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
	// Fails on a broken connection, as the first write will.
	_ = conn.SetDeadline(r.giveUp.Add(answerGrace))
	in := bufio.NewReaderSize(conn, answerBytes)
	var out []byte
	for {
		n, due, ok := r.next()
		if !ok {
			return nil
		}
		out = r.load.Request(out[:0], n)
		if _, err := conn.Write(out); err != nil {
			t.Broken++
			return nil //nolint:nilerr // counted
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
			t.Broken++
			return nil //nolint:nilerr // counted
		}
		now := time.Now()
		t.add(r.load.wants(status), !now.After(r.deadline), status, now.Sub(due))
		if r.load.OnAnswer != nil {
			r.load.OnAnswer(n, status, body)
		}
		_, _ = in.Discard(length) // cannot fail: the body is in the buffer
	}
}

// next waits until the next request is due, and returns its due time.
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

// scheduled is the number of requests of an open loop.
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

// answerBytes exceeds the size of any answer to a purchase.
const answerBytes = 4 << 10

var errNotHTTP = errors.New("httpload: unsupported answer")

// readHead reads the head of an answer and returns its status and the length of its body.
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

// Answers is the result of a load.
type Answers struct {
	ByStatus map[int]int64
	// Wanted counts answers with the wanted status, and inTime those of them that came before the end
	// of the load.
	Wanted, inTime int64
	// Broken counts requests without an answer because their connection broke.
	Broken int64
	// unsent counts requests of an open loop that were due and never sent, because all connections were
	// waiting for answers. Their waiting times are among the latencies.
	unsent int64
	// Took is the time until the last answer. lasted is the part of it that belongs to the load: at
	// most For, and less if Most ended the load earlier.
	Took, lasted time.Duration

	latencies []uint32 // in microseconds, sorted
}

// PerSecond is the rate of wanted answers while the load lasted. Later answers do not count, and
// neither does the wait for them: a few very late answers would make all others look slow.
func (a Answers) PerSecond() float64 { return float64(a.inTime) / a.lasted.Seconds() }

// Others counts requests with another answer than the wanted one, or none.
func (a Answers) Others() int64 {
	others := a.Broken + a.unsent - a.Wanted
	for _, n := range a.ByStatus {
		others += n
	}
	return others
}

// Percentile is the smallest latency that at least p percent of the wanted answers do not exceed; 0
// without answers.
func (a Answers) Percentile(p float64) time.Duration {
	n := len(a.latencies)
	if n == 0 {
		return 0
	}
	rank := int(math.Ceil(float64(n) * p / 100))
	return time.Duration(a.latencies[max(rank, 1)-1]) * time.Microsecond
}

// String lists how many answers had which status.
func (a Answers) String() string {
	var parts []string
	for _, status := range slices.Sorted(maps.Keys(a.ByStatus)) {
		parts = append(parts, fmt.Sprintf("%d × %d", a.ByStatus[status], status))
	}
	if a.Broken > 0 {
		parts = append(parts, fmt.Sprintf("%d × broken", a.Broken))
	}
	if a.unsent > 0 {
		parts = append(parts, fmt.Sprintf("%d × not sent", a.unsent))
	}
	return strings.Join(parts, ", ")
}

// tally is the answers of one connection, and why it ended early.
type tally struct {
	Answers
	err error
}

func (t *tally) add(wanted, inTime bool, status int, took time.Duration) {
	if t.ByStatus == nil {
		t.ByStatus = make(map[int]int64)
	}
	t.ByStatus[status]++
	if wanted {
		t.Wanted++
		if inTime {
			t.inTime++
		}
		t.latencies = append(t.latencies, inMicros(took))
	}
}

// inMicros stores latencies of up to an hour in half the space.
func inMicros(d time.Duration) uint32 { return uint32(min(d.Microseconds(), math.MaxUint32)) }

// sum adds the tallies after all connections have finished.
func (r *run) sum() (Answers, error) {
	end := time.Now()
	took := end.Sub(r.began)
	sum := Answers{ByStatus: make(map[int]int64), Took: took, lasted: min(took, r.load.For)}
	var errs []error
	for _, t := range r.tallies {
		for status, n := range t.ByStatus {
			sum.ByStatus[status] += n
		}
		sum.Wanted += t.Wanted
		sum.inTime += t.inTime
		sum.Broken += t.Broken
		sum.latencies = append(sum.latencies, t.latencies...)
		errs = append(errs, t.err)
	}
	if r.load.Rate > 0 && r.ctx.Err() == nil {
		for n := r.taken.Load() + 1; n <= r.scheduled(); n++ {
			sum.unsent++
			sum.latencies = append(sum.latencies, inMicros(end.Sub(r.due(n))))
		}
	}
	slices.Sort(sum.latencies)
	return sum, errors.Join(errs...)
}
