// Package live sends the changes of the dashboard to any number of browsers, as server-sent events. A browser gets
// everything once (the event "all"), and then each change (the event "change"). Each event is encoded once for all
// browsers, and a slow browser does not delay the others.
package live

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"stampede/internal/accept"
)

// Board is all that can be seen at one moment.
type Board struct {
	Number uint64
	At     time.Time
	// Values are texts and figures by the name of their place. Fragments are HTML, by the name of theirs: what changes
	// when rows come and go.
	Values, Fragments map[string]string
	// Points are the newest points of the charts, by chart.
	Points map[string][]Figure
}

// Figure is a number of a chart; NaN is one that is not known.
type Figure float64

// MarshalJSON writes five digits, which is more than a chart can show, and null for NaN.
func (f Figure) MarshalJSON() ([]byte, error) {
	if math.IsNaN(float64(f)) || math.IsInf(float64(f), 0) {
		return []byte("null"), nil
	}
	return strconv.AppendFloat(nil, float64(f), 'g', figureDigits, 64), nil
}

const (
	// WatchersMax bounds the browsers that watch at the same time.
	WatchersMax = 256
	// framesKept is how many changes a browser may have missed and still get: the newer ones.
	framesKept = 60
	// writeMax bounds one write: a browser that reads slower is dropped, and comes back.
	writeMax = 10 * time.Second
	// beat is the longest silence.
	beat         = 10 * time.Second
	figureDigits = 5
	// retryAfter is when a browser comes back that was cut off.
	retryAfter = time.Second
)

// errFull is returned when WatchersMax browsers watch.
var errFull = errors.New("too many open pages")

// Config configures a Hub.
type Config struct {
	// Next waits for the first moment after a number, and renders it.
	Next func(ctx context.Context, after uint64) (*Board, error)
	// Watching is called with the number of watchers whenever it changes.
	Watching func(n int)
}

// Hub sends changes to watchers. It renders nothing without a watcher.
type Hub struct {
	config Config
	// run makes the ids of events those of this process.
	run string

	mu       sync.Mutex
	watchers int
	arrived  chan struct{} // closed when there is a watcher
	board    *Board        // the newest; nil without a watcher
	whole    []byte        // board, encoded; nil until somebody wants it
	newest   *frame        // never nil
	kept     []*frame
}

// frame is an encoded event; more is closed when next is set. A chain of frames starts with one that has no event.
type frame struct {
	number uint64
	text   []byte
	more   chan struct{}
	next   *frame
}

func newFrame(number uint64) *frame { return &frame{number: number, more: make(chan struct{})} }

// New returns a Hub that sends nothing before Run.
func New(config Config) *Hub {
	return &Hub{config: config, run: rand.Text()[:8], arrived: make(chan struct{}), newest: newFrame(0)}
}

// Run sends updates until ctx is done, and then returns nil.
func (h *Hub) Run(ctx context.Context) error {
	var after uint64
	for {
		if !h.awaitWatcher(ctx) {
			return nil
		}
		board, err := h.config.Next(ctx, after)
		if err != nil {
			if ctx.Err() != nil {
				return nil //nolint:nilerr // the end of ctx is how it is stopped
			}
			return fmt.Errorf("dashboard: %w", err)
		}
		after = board.Number
		h.publish(board)
	}
}

// awaitWatcher returns false if ctx ended first.
func (h *Hub) awaitWatcher(ctx context.Context) bool {
	h.mu.Lock()
	some, arrived := h.watchers > 0, h.arrived
	if !some {
		h.board, h.whole, h.newest, h.kept = nil, nil, newFrame(0), nil // they would be old by then
	}
	h.mu.Unlock()
	if some {
		return ctx.Err() == nil
	}
	select {
	case <-arrived:
		return true
	case <-ctx.Done():
		return false
	}
}

// publish makes the change from the last board to this one the newest frame.
func (h *Hub) publish(board *Board) {
	h.mu.Lock()
	before := h.board
	h.mu.Unlock()
	next := newFrame(board.Number)
	if before == nil {
		next.text = h.encode("all", whole(board))
	} else {
		next.text = h.encode("change", change(before, board))
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.board, h.whole = board, nil
	h.newest.next = next
	close(h.newest.more)
	h.newest = next
	h.kept = append(h.kept, next)
	h.kept = h.kept[max(0, len(h.kept)-framesKept):]
}

// event is the JSON of an event.
type event struct {
	Number    uint64              `json:"n"`
	At        int64               `json:"at"` // milliseconds
	Values    map[string]string   `json:"v,omitempty"`
	Fragments map[string]string   `json:"f,omitempty"`
	Points    map[string][]Figure `json:"p,omitempty"`
}

func whole(b *Board) event { return event{b.Number, b.At.UnixMilli(), b.Values, b.Fragments, b.Points} }

// change is the event that makes one board of another. What is gone stays: its fragment no longer has its place.
func change(before, now *Board) event {
	return event{
		Number: now.Number, At: now.At.UnixMilli(), Points: now.Points,
		Values: differing(before.Values, now.Values), Fragments: differing(before.Fragments, now.Fragments),
	}
}

func differing(before, now map[string]string) map[string]string {
	changed := make(map[string]string)
	for name, value := range now {
		if was, had := before[name]; !had || was != value {
			changed[name] = value
		}
	}
	return changed
}

// encode writes an event; JSON has no line breaks.
func (h *Hub) encode(name string, e event) []byte {
	data, err := json.Marshal(e)
	if err != nil {
		panic(err) // a map of texts
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "id: %s-%d\nevent: %s\ndata: %s\n\n", h.run, e.Number, name, data)
	return b.Bytes()
}

// enter counts a watcher.
func (h *Hub) enter() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.watchers >= WatchersMax {
		return errFull
	}
	h.watchers++
	if h.watchers == 1 {
		close(h.arrived)
	}
	h.config.Watching(h.watchers)
	return nil
}

func (h *Hub) leave() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.watchers--
	if h.watchers == 0 {
		h.arrived = make(chan struct{})
	}
	h.config.Watching(h.watchers)
}

// begin returns where a watcher begins and what it gets first: nothing if it saw the event lastSeen and that is kept,
// or if there is nothing yet; else everything.
func (h *Hub) begin(lastSeen string) (at *frame, first []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.board == nil {
		return h.newest, nil
	}
	if number, ours := strings.CutPrefix(lastSeen, h.run+"-"); ours {
		if n, err := strconv.ParseUint(number, 10, 64); err == nil {
			for _, f := range h.kept {
				if f.number == n {
					return f, nil
				}
			}
		}
	}
	return h.newest, h.everything()
}

// after returns the frame behind one, and its event; or the newest one and everything, if the watcher has missed more
// than is kept: what it has not got yet is in memory for it alone.
func (h *Hub) after(at *frame) (*frame, []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if next := at.next; next.number >= h.kept[0].number {
		return next, next.text
	}
	return h.newest, h.everything()
}

// everything is the board as an event. The caller holds h.mu.
func (h *Hub) everything() []byte {
	if h.whole == nil {
		h.whole = h.encode("all", whole(h.board))
	}
	return h.whole
}

// Serve streams to a browser until it leaves, alive returns false, or ctx ends. An error was not answered yet.
func (h *Hub) Serve(ctx context.Context, w http.ResponseWriter, r *http.Request, alive func() bool) error {
	if err := h.enter(); err != nil {
		return err
	}
	defer h.leave()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(r.Context(), cancel)()
	s := stream{hub: h, w: w, control: http.NewResponseController(w), alive: alive}
	accept.EventStream(w.Header())
	w.WriteHeader(http.StatusOK)
	if !s.send(fmt.Appendf(nil, "retry: %d\n\n", retryAfter.Milliseconds())) {
		return nil
	}
	at, first := h.begin(r.Header.Get("Last-Event-ID"))
	if first != nil && !s.send(first) {
		return nil
	}
	for s.follow(ctx, &at) {
	}
	return nil
}

// stream is one browser.
type stream struct {
	hub     *Hub
	w       http.ResponseWriter
	control *http.ResponseController
	alive   func() bool
}

// follow sends the next frame, or a heartbeat if there is none for long. It returns false at the end.
func (s stream) follow(ctx context.Context, at **frame) bool {
	silence := time.NewTimer(beat)
	defer silence.Stop()
	select {
	case <-(*at).more:
		if !s.alive() {
			_ = s.send([]byte("event: over\ndata: {}\n\n"))
			return false
		}
		var text []byte
		*at, text = s.hub.after(*at)
		return s.send(text)
	case <-silence.C:
		return s.alive() && s.send([]byte(": beat\n\n"))
	case <-ctx.Done():
		return false
	}
}

func (s stream) send(text []byte) bool {
	if err := s.control.SetWriteDeadline(time.Now().Add(writeMax)); err != nil {
		return false
	}
	if _, err := s.w.Write(text); err != nil {
		return false
	}
	return s.control.Flush() == nil
}
