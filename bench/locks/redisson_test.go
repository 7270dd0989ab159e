package locks

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/bench/designs/redisson"
	"stampede/bench/rig"
	"stampede/internal/dev/child"
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
	in   io.Writer
	out  *bufio.Scanner
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
	cmd := exec.Command("java", "-cp", classes, "stampede.Driver", url, fmt.Sprint(leaseTime.Milliseconds()))
	in, err := cmd.StdinPipe()
	require.NoError(b, err)
	// The command's own pipe would be closed when the process ends, also with unread output.
	outRead, outWrite := io.Pipe()
	cmd.Stdout, cmd.Stderr = outWrite, os.Stderr
	process, err := child.Start(cmd, syscall.SIGKILL)
	require.NoError(b, err)
	go func() {
		_ = outWrite.CloseWithError(process.Wait())
	}()
	rig.AtExit(func() {
		_ = in.Close() // ends the program
		process.Stop(syscall.SIGTERM, 5*time.Second)
	})
	r := &javaProcess{in: in, out: bufio.NewScanner(outRead)}
	require.True(b, r.out.Scan(), "Redisson printed nothing: %v", r.out.Err())
	require.Equal(b, "ready", r.out.Text())
	return r
}

// run runs one command of the Java program.
func (r *javaProcess) run(b *testing.B, v rig.Values, what, command string) {
	b.Helper()
	_, err := fmt.Fprintln(r.in, "bench", command)
	require.NoError(b, err)
	require.True(b, r.out.Scan(), "Redisson does not answer %q: %v", command, r.out.Err())
	var answer struct {
		MedianNS time.Duration `json:"median_ns"`
		P99NS    time.Duration `json:"p99_ns"`
	}
	line := strings.TrimPrefix(r.out.Text(), "bench ")
	require.NoError(b, json.Unmarshal([]byte(line), &answer), "Redisson answers %q: %q", command, line)
	require.NotZero(b, answer.MedianNS, line)
	put(v, what, []time.Duration{answer.MedianNS})
	v[what+p99] = percentile([]time.Duration{answer.P99NS}, 99)
}
