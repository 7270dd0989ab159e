package tracing_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"stampede/internal/connect"
	"stampede/internal/test/testkit"
	"stampede/internal/tracing"
	"stampede/internal/tracing/otlp"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const (
	trace   = "4bf92f3577b34da6a3ce929d0e0e4736"
	sampled = "00-" + trace + "-00f067aa0ba902b7-01"
)

// start returns a tracer that exports to an endpoint, with its registry.
func start(t *testing.T, endpoint string, perSecond int) (*tracing.Tracer, *prometheus.Registry) {
	t.Helper()
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
	registry := prometheus.NewRegistry()
	tracer, err := otlp.New(t.Context(), otlp.Config{
		Service: "test", PerSecond: perSecond, Logger: slog.New(slog.DiscardHandler), Registerer: registry,
	})
	require.NoError(t, err)
	require.NotNil(t, tracer)
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	t.Cleanup(tracer.Close)
	return tracer, registry
}

func header(parents ...string) http.Header { return http.Header{"Traceparent": parents} }

func requireSpans(t *testing.T, registry *prometheus.Registry, exported, dropped int) {
	t.Helper()
	require.NoError(t, testutil.GatherAndCompare(registry, strings.NewReader(fmt.Sprintf(`
# HELP stampede_trace_spans_total Spans by result: exported, or dropped because the collector did not take them in time.
# TYPE stampede_trace_spans_total counter
stampede_trace_spans_total{result="dropped"} %d
stampede_trace_spans_total{result="exported"} %d
`, dropped, exported)), "stampede_trace_spans_total"))
}

func TestSampledParentsAreValidTraceparents(t *testing.T) {
	for _, good := range []string{
		sampled, sampled[:53] + "03", sampled[:53] + "ff", "01" + sampled[2:], "cc" + sampled[2:] + "-what the future brings",
	} {
		require.True(t, tracing.Sampled(good), good)
	}
	for _, bad := range []string{
		"", "0", sampled[:53] + "00", sampled[:53] + "02", sampled[:54], sampled + "0", sampled + "-00", "ff" + sampled[2:],
		"0G" + sampled[2:], "01" + sampled[2:] + "0", strings.ToUpper(sampled), strings.ReplaceAll(sampled, "-", "_"),
		"00-" + strings.Repeat("0", 32) + sampled[35:], sampled[:36] + strings.Repeat("0", 16) + sampled[52:],
		" " + sampled, "01" + sampled[2:] + "-" + strings.Repeat("x", 300), strings.Replace(sampled, "4bf9", "4bg9", 1),
	} {
		require.False(t, tracing.Sampled(bad), bad)
	}
}

func FuzzSampled(f *testing.F) {
	f.Add(sampled)
	f.Fuzz(func(t *testing.T, text string) {
		if tracing.Sampled(text) {
			require.GreaterOrEqual(t, len(text), len(sampled))
			require.Contains(t, "13579bdf", text[54:55])
		}
	})
}

// Nothing is allocated by a tracer that is off, nor for requests without a sampled parent by one that is on.
func TestWhatIsNotTracedAllocatesNothing(t *testing.T) {
	collector := testkit.NewCollector(t)
	on, _ := start(t, collector.URL, 1)
	ctx := context.Background()
	for name, tracer := range map[string]*tracing.Tracer{"off": nil, "on": on} {
		for _, h := range []http.Header{
			{}, header(sampled[:53] + "00"), header("x"), header(sampled, sampled), header(strings.Repeat("a", 500)),
		} {
			allocations := testing.AllocsPerRun(100, func() {
				span := tracer.Request(h, "name")
				other := tracing.Current(span.In(ctx))
				child := other.Start(tracing.Client, "child")
				child.Text("name", "value")
				child.Number("number", 1)
				child.Fail(errors.ErrUnsupported)
				child.Link(sampled)
				child.End()
				record := tracer.Continue(tracing.Consumer, "record", child.Parent())
				record.End()
				span.End()
				if span.On() || child.On() || record.On() {
					panic("traced")
				}
			})
			require.Zero(t, allocations, "%s %v", name, h)
		}
	}
	off := testing.AllocsPerRun(100, func() {
		span := (*tracing.Tracer)(nil).Request(header(sampled), "name")
		span.End()
	})
	require.LessOrEqual(t, off, 2.0, "the header and its value")
}

func TestTracerIsOffWithoutEndpoint(t *testing.T) {
	for _, settings := range []map[string]string{
		{},
		{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
		{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
	} {
		t.Run(fmt.Sprint(settings), func(t *testing.T) {
			for name, value := range settings {
				t.Setenv(name, value)
			}
			registry := prometheus.NewRegistry()
			tracer, err := otlp.New(t.Context(), otlp.Config{Service: "test", Registerer: registry})
			require.NoError(t, err)
			require.Nil(t, tracer)
			config := &pgx.ConnConfig{}
			tracer.Postgres(config, nil)
			require.Equal(t, &pgx.ConnConfig{}, config)
			tracer.Close()
			requireSpans(t, registry, 0, 0) // the series exist nevertheless
		})
	}
}

// The sampler of the environment may not sample by itself, and its resource describes the process.
func TestOnlySampledParentsAreTraced(t *testing.T) {
	t.Setenv("OTEL_TRACES_SAMPLER", "always_on")
	t.Setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.name=shop")
	collector := testkit.NewCollector(t)
	tracer, registry := start(t, collector.URL, 100)
	require.False(t, tracer.Request(header(), "request").On())
	require.False(t, tracer.Request(header(sampled[:53]+"00"), "request").On())
	span := tracer.Request(header(sampled), "request")
	require.True(t, span.On())
	child := tracing.Current(span.In(t.Context())).Start(tracing.Internal, "child", sampled)
	child.Fail(errors.ErrUnsupported)
	child.Text("long", strings.Repeat("x", 5000))
	child.End()
	span.End()
	tracer.Close()
	requireSpans(t, registry, 2, 0)
	spans := collector.Spans()
	require.Len(t, spans, 2)
	assert.Equal(t, []string{"request", "child"}, []string{spans[0].Name, spans[1].Name})
	assert.Equal(t, []string{"00f067aa0ba902b7", spans[0].ID}, []string{spans[0].Parent, spans[1].Parent})
	assert.Equal(t, "shop", spans[0].Service)
	assert.Equal(t, trace, spans[1].Trace)
	assert.Equal(t, []string{sampled}, spans[1].Links)
	assert.True(t, spans[1].Failed)
	assert.Equal(t, "_OTHER", spans[1].Attributes["error.type"])
	assert.Empty(t, spans[1].Text)
	assert.Regexp(t, "^[0-9a-f-]{36}$", spans[1].Resource["service.instance.id"])
	assert.Len(t, spans[1].Attributes["long"], 1024)
	require.False(t, tracer.Request(header(sampled), "request").On(), "it is closed")
}

// Each statement of a batch, its COMMIT included, has one span, which is as long as it takes, though the server would
// answer all of them together. What a statement says, and what its error says, is not in it.
func TestStatementsOfBatchTakeTheirTime(t *testing.T) {
	collector := testkit.NewCollector(t)
	tracer, _ := start(t, collector.URL, 1)
	pool := testkit.PoolAt(t, testkit.DatabaseURL(t), 1, connect.Traced(tracer))
	_, err := pool.Exec(t.Context(), `CREATE TABLE buyers (name text);
		CREATE FUNCTION rest() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.4); RETURN NULL; END';
		CREATE CONSTRAINT TRIGGER rest AFTER INSERT ON buyers DEFERRABLE INITIALLY DEFERRED
		FOR EACH ROW EXECUTE FUNCTION rest()`)
	require.NoError(t, err)
	const rounds = 2 // the first one prepares the statements
	for range rounds {
		span := tracer.Continue(tracing.Server, "request", sampled)
		batch := &pgx.Batch{}
		batch.Queue("BEGIN")
		batch.Queue("SELECT pg_sleep(0.4)")
		batch.Queue("INSERT INTO buyers VALUES ($1)", "ann")
		batch.Queue("COMMIT")
		require.NoError(t, pool.SendBatch(span.In(t.Context()), batch).Close())
		_, err := pool.Exec(span.In(t.Context()), "UPDATE buyers SET name = ($1 || name)::integer", "ann")
		require.Error(t, err)
		span.End()
	}
	tracer.Close()
	took := map[string][]time.Duration{}
	for _, span := range collector.Spans() {
		took[span.Name] = append(took[span.Name], span.Ended.Sub(span.Began))
		assert.NotContains(t, fmt.Sprint(span.Attributes, span.Text), "ann")
		if span.Name != "request" && span.Name != "wait for a connection" {
			assert.Equal(t, "postgresql", span.Attributes["db.system.name"])
			assert.Equal(t, span.Name, span.Attributes["db.query.summary"])
			assert.NotEmpty(t, span.Attributes["server.address"])
		}
		if assert.Equal(t, span.Name == "UPDATE", span.Failed, span.Name); span.Failed {
			assert.Equal(t, "22P02", span.Attributes["error.type"])
			assert.Equal(t, "22P02", span.Attributes["db.response.status_code"])
		}
	}
	// The test may read an answer late.
	for name, least := range map[string]time.Duration{
		"BATCH": 600 * time.Millisecond, "BEGIN": 0, "SELECT": 200 * time.Millisecond, "INSERT": 0,
		"COMMIT": 200 * time.Millisecond, "UPDATE": 0,
	} {
		if assert.Len(t, took[name], rounds, name) {
			assert.GreaterOrEqual(t, slices.Min(took[name]), least, name)
		}
	}
	t.Log("\n" + collector.Tree(trace))
}

func TestRequestsAreTracedUpToRate(t *testing.T) {
	collector := testkit.NewCollector(t)
	tracer, registry := start(t, collector.URL, 3)
	began, traced := time.Now(), 0
	for range 1000 {
		if span := tracer.Request(header(sampled), "request"); span.On() {
			traced++
			span.End()
		}
	}
	require.GreaterOrEqual(t, traced, 3)
	require.LessOrEqual(t, traced, 4+int(3*time.Since(began).Seconds()))
	require.NoError(t, testutil.GatherAndCompare(registry, strings.NewReader(fmt.Sprintf(`
# HELP stampede_traces_over_rate_total Requests with a sampled parent that were not traced, because there were too many.
# TYPE stampede_traces_over_rate_total counter
stampede_traces_over_rate_total %d
`, 1000-traced)), "stampede_traces_over_rate_total"))
}

// Whatever a collector does, spans cost no time, and each one is counted once.
func TestCollectorThatHangsDelaysNothing(t *testing.T) {
	const spans = 20_000
	called, goOn := make(chan struct{}, 10), make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // else the end of the connection is not seen
		called <- struct{}{}
		select {
		case <-goOn:
		case <-r.Context().Done():
		}
	}))
	t.Cleanup(server.Close)
	t.Cleanup(func() { close(goOn) })
	others := goleak.IgnoreCurrent()
	tracer, registry := start(t, server.URL, 1)
	began := time.Now()
	for i := range spans {
		tracer.Continue(tracing.Consumer, "record", sampled).End()
		if i == 0 {
			<-called
		}
	}
	require.Less(t, time.Since(began), 20*time.Second)
	dropped, err := registry.Gather()
	require.NoError(t, err)
	require.Contains(t, fmt.Sprint(dropped), fmt.Sprintf("value:%d", spans-4096), "the queue has a bound")
	began = time.Now()
	tracer.Close()
	require.Less(t, time.Since(began), 20*time.Second)
	requireSpans(t, registry, 0, spans)
	testkit.Eventually(t, 30*time.Second, "nothing goes on", func() bool { return goleak.Find(others) == nil })
}
