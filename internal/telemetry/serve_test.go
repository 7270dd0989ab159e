package telemetry

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// running is a server under test; result gets the error of serve.
type running struct {
	addr   string
	stop   context.CancelFunc
	result chan error
}

func start(t *testing.T, handler http.Handler) running {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, stop := context.WithCancel(context.Background())
	r := running{listener.Addr().String(), stop, make(chan error, 1)}
	go func() {
		defer close(r.result)
		r.result <- serve(ctx, listener, handler)
	}()
	t.Cleanup(func() {
		stop()
		<-r.result // closed at the end
		http.DefaultClient.CloseIdleConnections()
	})
	return r
}

func (r running) get(t *testing.T, path string) (status int, body string) {
	t.Helper()
	response, err := http.Get("http://" + r.addr + path)
	require.NoError(t, err)
	defer response.Body.Close()
	content, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return response.StatusCode, string(content)
}

func alwaysReady(context.Context) error { return nil }

func TestMetricsOfBuildRuntimeAndProcess(t *testing.T) {
	r := start(t, newHandler(NewRegistry(), alwaysReady))
	status, body := r.get(t, "/metrics")
	assert.Equal(t, http.StatusOK, status)
	assert.Contains(t, body, "stampede_build_info{go_version=\"go1.")
	assert.Contains(t, body, "\ngo_goroutines ")
	assert.Contains(t, body, "\nprocess_resident_memory_bytes ")
}

func TestReadyzReturnsError(t *testing.T) {
	why := make(chan error, 1)
	r := start(t, newHandler(NewRegistry(), func(ctx context.Context) error {
		_, bounded := ctx.Deadline()
		assert.True(t, bounded)
		return <-why
	}))
	why <- nil
	status, body := r.get(t, "/readyz")
	assert.Equal(t, http.StatusOK, status)
	assert.Equal(t, "ok\n", body)

	why <- errors.New("Postgres is away")
	status, body = r.get(t, "/readyz")
	assert.Equal(t, http.StatusServiceUnavailable, status)
	assert.Equal(t, "not ready: Postgres is away\n", body)

	status, _ = r.get(t, "/livez")
	assert.Equal(t, http.StatusOK, status)
	status, _ = r.get(t, "/other")
	assert.Equal(t, http.StatusNotFound, status)
}

func TestStopFinishesRunningRequest(t *testing.T) {
	started, finish := make(chan struct{}), make(chan struct{})
	r := start(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		close(started)
		<-finish
		writeText(w, http.StatusOK, "finished")
	}))
	conn, err := net.Dial("tcp", r.addr)
	require.NoError(t, err)
	defer conn.Close()
	_, err = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: test\r\n\r\n")
	require.NoError(t, err)

	<-started
	r.stop()
	require.Eventually(t, func() bool {
		late, err := net.Dial("tcp", r.addr)
		if err == nil {
			_ = late.Close()
		}
		return err != nil
	}, 5*time.Second, time.Millisecond, "it accepts no more connections")
	close(finish)
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	assert.Equal(t, "finished\n", string(body))
	assert.NoError(t, <-r.result)
}

func TestServeFailsOnTakenPort(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	err = Serve(t.Context(), taken.Addr().String(), NewRegistry(), alwaysReady)
	assert.ErrorContains(t, err, "address already in use")
}
