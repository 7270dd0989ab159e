package locks

import (
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/bench/designs/redisson"
	"stampede/bench/rig"
)

// redissonClasses is the class path of the program, empty if it cannot be built.
var redissonClasses = sync.OnceValue(func() string {
	classPath, err := redisson.Compile()
	if err != nil {
		fmt.Fprintf(os.Stderr, "NOT COMPARED WITH REDISSON: %v\n", err)
	}
	return classPath
})

// javaProcess is the Java program, connected to a server. It measures the same two calls with
// System.nanoTime.
type javaProcess struct {
	*redisson.Redisson
	warm bool
}

// withRedisson adds Redisson to the candidates if Java and Maven are installed.
func withRedisson(candidates []rig.Candidate, measure func(b *testing.B, v rig.Values)) []rig.Candidate {
	if redissonClasses() == "" {
		return candidates
	}
	return append(candidates, rig.Candidate{Name: "redisson", Turn: func(b *testing.B, _ int) rig.Values {
		v := rig.Values{}
		measure(b, v)
		return v
	}})
}

// java starts the program on first use.
func (s *server) java(b *testing.B) *javaProcess {
	b.Helper()
	if s.redisson == nil {
		s.redisson = startRedisson(b, redissonClasses(), s.url)
	}
	if r := s.redisson; b.N > 1 && !r.warm { // a smoke test may run cold Java
		r.run(b, rig.Values{}, "", "bench-uncontended "+newKey()+" 4s")
		r.run(b, rig.Values{}, "", "bench-contended "+newKey()+" 32 300 1000")
		r.warm = true
	}
	return s.redisson
}

func startRedisson(b *testing.B, classes, url string) *javaProcess {
	b.Helper()
	java, err := redisson.Start(classes, url, leaseTime)
	require.NoError(b, err)
	rig.AtExit(java.Stop)
	return &javaProcess{Redisson: java}
}

// run runs one command of the Java program.
func (r *javaProcess) run(b *testing.B, v rig.Values, what, command string) {
	b.Helper()
	line, err := r.Ask(b.Context(), command)
	require.NoError(b, err)
	var answer struct {
		MedianNS time.Duration `json:"median_ns"`
		P99NS    time.Duration `json:"p99_ns"`
	}
	require.NoError(b, json.Unmarshal([]byte(line), &answer), "Redisson answers %q: %q", command, line)
	require.NotZero(b, answer.MedianNS, line)
	put(v, what, []time.Duration{answer.MedianNS})
	v[what+p99] = percentile([]time.Duration{answer.P99NS}, 99)
}
