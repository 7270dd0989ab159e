package fleet

import (
	"bytes"
	"context"
	"os"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// BenchmarkRound is a round of a fleet of ten processes, with real pages of stampede dev (ingress and worker in one
// process), and with its looks into Redis and Postgres. What one takes is the share of a core that a fleet uses.
func BenchmarkRound(b *testing.B) {
	text, err := os.ReadFile("testdata/page.txt")
	require.NoError(b, err)
	var targets []string
	for range 10 {
		targets = append(targets, newPage(b, string(text)).target())
	}
	f, s := newFleet(b, targets...)
	for range 20 {
		s.Open(b, 1000)
	}
	for range 5 {
		f.round(context.Background())
	}
	began := cpuTime(b)
	for b.Loop() {
		f.round(context.Background())
	}
	b.ReportMetric(float64((cpuTime(b)-began).Microseconds())/1000/float64(b.N), "cpu-ms/round")
	require.True(b, f.Snapshot().Processes[9].Up)
}

// cpuTime is that of this process so far, with the pages that it serves to itself.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var used unix.Rusage
	require.NoError(b, unix.Getrusage(unix.RUSAGE_SELF, &used))
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

// BenchmarkRead is the parse of one page: of the metrics that are wanted, and for comparison of all of them.
func BenchmarkRead(b *testing.B) {
	text, err := os.ReadFile("testdata/page.txt")
	require.NoError(b, err)
	b.Run("wanted", func(b *testing.B) {
		for b.Loop() {
			_, err := read(text)
			require.NoError(b, err)
		}
	})
	b.Run("all", func(b *testing.B) {
		for b.Loop() {
			parser := expfmt.NewTextParser(model.UTF8Validation)
			_, err := parser.TextToMetricFamilies(bytes.NewReader(text))
			require.NoError(b, err)
		}
	})
}
