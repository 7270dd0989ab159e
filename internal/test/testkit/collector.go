package testkit

import (
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	"google.golang.org/protobuf/proto"

	"stampede/internal/tracing"
	"stampede/internal/tracing/otlp"
)

// Span is a span as a Collector has received it.
type Span struct {
	Service, Name, Trace, ID, Parent string
	// Links are the traceparents of the linked spans.
	Links []string
	// Resource describes the process.
	Attributes, Resource map[string]string
	Failed               bool
	// Text is of the status.
	Text         string
	Began, Ended time.Time
}

// TraceParent is the span as its children name it.
func (s Span) TraceParent() string { return "00-" + s.Trace + "-" + s.ID + "-01" }

// Collector receives spans by OTLP over HTTP, as a collector of OpenTelemetry does.
type Collector struct {
	// URL is the value of OTEL_EXPORTER_OTLP_ENDPOINT.
	URL string

	mu    sync.Mutex
	spans []Span
	wrong []error
}

// NewCollector starts a Collector. It fails the test if something else than spans arrives.
func NewCollector(t testing.TB) *Collector {
	t.Helper()
	c := &Collector{}
	server := httptest.NewServer(c)
	c.URL = server.URL
	t.Cleanup(func() {
		server.Close()
		for _, err := range c.wrong {
			t.Error(err)
		}
	})
	return c
}

// ServeHTTP implements http.Handler.
func (c *Collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	spans, err := readSpans(r)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		c.wrong = append(c.wrong, err)
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	c.spans = append(c.spans, spans...)
	w.Header().Set("Content-Type", "application/x-protobuf")
}

func readSpans(r *http.Request) (spans []Span, err error) {
	if r.Method != http.MethodPost || r.URL.Path != "/v1/traces" {
		return nil, fmt.Errorf("the collector got %s %s", r.Method, r.URL.Path)
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	var request collector.ExportTraceServiceRequest
	if err := proto.Unmarshal(body, &request); err != nil {
		return nil, fmt.Errorf("the collector got no spans: %w", err)
	}
	for _, resource := range request.GetResourceSpans() {
		process := texts(resource.GetResource().GetAttributes())
		for _, scope := range resource.GetScopeSpans() {
			for _, s := range scope.GetSpans() {
				span := Span{
					Service: process["service.name"], Name: s.GetName(), Trace: hex.EncodeToString(s.GetTraceId()),
					ID: hex.EncodeToString(s.GetSpanId()), Parent: hex.EncodeToString(s.GetParentSpanId()),
					Attributes: texts(s.GetAttributes()), Resource: process,
					Failed: s.GetStatus().GetCode() == 2, Text: s.GetStatus().GetMessage(),
					Began: time.Unix(0, int64(s.GetStartTimeUnixNano())), Ended: time.Unix(0, int64(s.GetEndTimeUnixNano())),
				}
				for _, link := range s.GetLinks() {
					span.Links = append(span.Links,
						"00-"+hex.EncodeToString(link.GetTraceId())+"-"+hex.EncodeToString(link.GetSpanId())+"-01")
				}
				spans = append(spans, span)
			}
		}
	}
	return spans, nil
}

func texts(attributes []*common.KeyValue) map[string]string {
	found := make(map[string]string, len(attributes))
	for _, a := range attributes {
		switch value := a.GetValue().GetValue().(type) {
		case *common.AnyValue_StringValue:
			found[a.GetKey()] = value.StringValue
		case *common.AnyValue_IntValue:
			found[a.GetKey()] = fmt.Sprint(value.IntValue)
		}
	}
	return found
}

// Spans returns all spans so far, in the order in which they began.
func (c *Collector) Spans() []Span {
	c.mu.Lock()
	defer c.mu.Unlock()
	spans := slices.Clone(c.spans)
	slices.SortStableFunc(spans, func(a, b Span) int { return a.Began.Compare(b.Began) })
	return spans
}

// Named returns the spans of a trace with this name; of all traces if that is empty.
func (c *Collector) Named(trace, name string) (found []Span) {
	for _, s := range c.Spans() {
		if (trace == "" || s.Trace == trace) && s.Name == name {
			found = append(found, s)
		}
	}
	return found
}

func inMS(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// Tree shows the spans of a trace, each below its parent, with the time since the first one and its duration.
func (c *Collector) Tree(trace string) string {
	var text strings.Builder
	spans := slices.DeleteFunc(c.Spans(), func(s Span) bool { return s.Trace != trace })
	known := map[string]bool{}
	for _, s := range spans {
		known[s.ID] = true
	}
	var show func(parent Span, depth int)
	show = func(parent Span, depth int) {
		_, _ = fmt.Fprintf(&text, "%-50s at %7.2f ms for %7.2f ms [%s] %v", strings.Repeat("  ", depth)+parent.Name,
			inMS(parent.Began.Sub(spans[0].Began)), inMS(parent.Ended.Sub(parent.Began)), parent.Service, parent.Attributes)
		if len(parent.Links) > 0 {
			_, _ = fmt.Fprintf(&text, " links to %v", parent.Links)
		}
		_ = text.WriteByte('\n') // never fails
		for _, s := range spans {
			if s.Parent == parent.ID {
				show(s, depth+1)
			}
		}
	}
	for _, s := range spans {
		if !known[s.Parent] {
			show(s, 0)
		}
	}
	return text.String()
}

// Tracer returns a tracer that exports to a Collector soon. The test must not be parallel: the tracer reads the
// environment.
func Tracer(t *testing.T) (*tracing.Tracer, *Collector) {
	t.Helper()
	collector := NewCollector(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "10") // ms
	tracer, err := otlp.New(t.Context(), otlp.Config{
		Service: "test", PerSecond: 1000, Logger: slog.New(slog.DiscardHandler),
	})
	require.NoError(t, err)
	t.Cleanup(tracer.Close)
	return tracer, collector
}
