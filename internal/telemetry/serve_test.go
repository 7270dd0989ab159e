package telemetry

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"runtime/debug"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"stampede/internal/clocks"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

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

func TestClockIsComparedWithPostgres(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		postgres clocks.Reading
		err      error
		series   int
	}{
		"behind":       {clocks.Reading{Offset: 3 * time.Second, Margin: time.Second}, nil, 1},
		"not answered": {clocks.Reading{}, errors.ErrUnsupported, 0},
	} {
		registry := prometheus.NewRegistry()
		ctx, stop := context.WithCancel(t.Context())
		run, err := WatchClock(registry, func(context.Context) (clocks.Reading, error) {
			stop() // this look is the last
			return c.postgres, c.err
		})
		require.NoError(t, err)
		run(ctx)
		families, err := registry.Gather()
		require.NoError(t, err)
		require.Len(t, families, c.series, name)
		if c.series > 0 {
			require.InDelta(t, -2, families[0].GetMetric()[0].GetGauge().GetValue(), 0.01, "less the half round trip")
		}
	}
}

func TestGuardAgeIsThatOfOldestPartition(t *testing.T) {
	t.Parallel()
	a, err := NewGuardAge(prometheus.NewRegistry(), "worker")
	require.NoError(t, err)
	past := time.Now().Add(-time.Hour)
	a.idle = past
	require.InDelta(t, 3600, a.seconds(), 60, "it has not begun")
	a.Guards([]int{0, 1})
	a.Verified(0)
	require.InDelta(t, 0, a.seconds(), 60)
	a.verified[1] = past
	a.Guards([]int{0, 1})
	require.InDelta(t, 3600, a.seconds(), 60, "partition 1 was not verified since")
	a.Verified(1)
	require.InDelta(t, 0, a.seconds(), 60)
	a.verified[1] = past
	a.Guards([]int{0})
	a.Verified(1)
	require.InDelta(t, 0, a.seconds(), 60, "partition 1 is not guarded any more")
	a.Guards(nil)
	require.InDelta(t, 0, a.seconds(), 60)

	var none *GuardAge
	none.Guards([]int{0})
	none.Verified(0)
}

func TestVersionFromBuildInfo(t *testing.T) {
	commit := debug.BuildSetting{Key: "vcs.revision", Value: "0123456789abcdef0123456789abcdef01234567"}
	clean, dirty := debug.BuildSetting{Key: "vcs.modified", Value: "false"},
		debug.BuildSetting{Key: "vcs.modified", Value: "true"}
	for want, info := range map[string]*debug.BuildInfo{
		"v1.2.3":                   {Main: debug.Module{Version: "v1.2.3"}, Settings: []debug.BuildSetting{commit}},
		"devel":                    {Main: debug.Module{Version: "(devel)"}},
		"devel-0123456789ab":       {Settings: []debug.BuildSetting{commit, clean}},
		"devel-0123456789ab+dirty": {Main: debug.Module{Version: "(devel)"}, Settings: []debug.BuildSetting{commit, dirty}},
	} {
		assert.Equal(t, want, versionFrom(info))
	}
	assert.NotEmpty(t, BuildVersion())
}

func TestBuildVersionOfRelease(t *testing.T) {
	version = "v9.9.9"
	defer func() { version = "" }()
	assert.Equal(t, "v9.9.9", BuildVersion())
}
