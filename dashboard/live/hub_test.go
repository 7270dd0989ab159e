package live

import (
	"bytes"
	"context"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// held is a browser that takes an event only when it is told to.
type held struct {
	header http.Header
	begun  chan struct{} // a write has begun
	events chan []byte   // and is done
}

func (h *held) take() string {
	<-h.begun
	return string(<-h.events)
}

func (h *held) Header() http.Header { return h.header }
func (h *held) WriteHeader(int)     {}
func (h *held) Flush()              {}
func (h *held) Write(text []byte) (int, error) {
	h.begun <- struct{}{}
	h.events <- bytes.Clone(text)
	return len(text), nil
}
func (h *held) SetWriteDeadline(time.Time) error { return nil }

// A browser that takes each event in time, but fewer than there are, must not keep all of them in memory for hours.
func TestBrowserThatFallsBehindGetsEverythingAnew(t *testing.T) {
	t.Parallel()
	boards := make(chan *Board)
	h := New(Config{
		Next: func(ctx context.Context, _ uint64) (*Board, error) {
			select {
			case b := <-boards:
				return b, nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		},
		Watching: func(int) {},
	})
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 2)
	go func() { ended <- h.Run(ctx) }()
	browser := &held{http.Header{}, make(chan struct{}), make(chan []byte)}
	go func() {
		ended <- h.Serve(ctx, browser, httptest.NewRequest(http.MethodGet, "/live", nil), func() bool { return true })
	}()
	require.Contains(t, browser.take(), "retry: ")
	show := func(n int) {
		boards <- &Board{Number: uint64(n), At: time.Now(), Values: map[string]string{"n": strconv.Itoa(n)}}
	}
	show(1)
	require.Contains(t, browser.take(), "event: all")
	show(2)
	<-browser.begun
	const missed = framesKept + 10
	for n := 3; n <= 2+missed; n++ {
		show(n)
	}
	require.Contains(t, string(<-browser.events), "event: change", "it was on its way")
	anew := browser.take()
	require.Contains(t, anew, "event: all")
	require.Regexp(t, `"n":"(71|72)"`, anew, "the newest, or the one before, if that is not encoded yet")
	stop()
	go func() { // the last board may be on its way
		for range browser.begun {
			<-browser.events
		}
	}()
	require.NoError(t, <-ended)
	require.NoError(t, <-ended)
	close(browser.begun)
}
