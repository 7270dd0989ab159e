//go:build redisson

package lock_test

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/child"
	"stampede/internal/test/testkit"
)

// redisson is a Java process that uses Redisson's locks on command; see its Driver.java.
type redisson struct {
	in      io.Writer
	process *child.Process
	output  *answers
}

// redissonPath is the folder of the compiled program within testdata/redisson. Each version of Redisson
// has its own.
var redissonPath = flag.String("redisson", "target", "the folder of the compiled program in testdata/redisson")

func isOldRedisson() bool { return *redissonPath != "target" }

// startRedisson takes the lease of Redisson's watchdog, and a server unless it is the tests' own.
func startRedisson(t *testing.T, watchdog time.Duration, server ...string) *redisson {
	t.Helper()
	target := "testdata/redisson/" + *redissonPath
	classpath, err := os.ReadFile(target + "/classpath")
	require.NoError(t, err, "task test:redisson builds it")
	// A fast start and little memory: several processes run at a time.
	args := []string{
		"-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx128m",
		"-cp", target + "/classes:" + string(classpath), "stampede.Driver",
	}
	if len(server) == 0 {
		server = []string{testkit.RedisURL(t)}
	}
	args = append(append(args, server...), strconv.FormatInt(watchdog.Milliseconds(), 10))
	cmd := exec.Command("java", args...)
	java := &redisson{output: &answers{due: map[string]chan string{}}}
	java.in, err = cmd.StdinPipe()
	require.NoError(t, err)
	var stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = java.output, &stderr
	ready := java.output.expect("ready")
	java.process, err = child.Start(cmd, syscall.SIGKILL)
	require.NoError(t, err)
	t.Cleanup(func() {
		java.kill()
		if t.Failed() {
			t.Logf("standard error of Java:\n%s", stderr.String())
		}
	})
	java.wait(t, ready)
	return java
}

// kill ends the process by SIGKILL and returns when it is gone.
func (r *redisson) kill() { r.process.Stop(syscall.SIGKILL, patience) }

// tell sends a command to a session and returns the channel of its answer.
func (r *redisson) tell(session, format string, args ...any) <-chan string {
	answer := r.output.expect(session)
	// If the process is gone, wait finds that there is no answer.
	_, _ = fmt.Fprintf(r.in, "%s "+format+"\n", append([]any{session}, args...)...)
	return answer
}

func (r *redisson) ask(t *testing.T, session, format string, args ...any) string {
	t.Helper()
	return r.wait(t, r.tell(session, format, args...))
}

// waitAsleep waits until a session sleeps after a busy answer: if it gets the lock later, a message
// has woken it.
func (r *redisson) waitAsleep(t *testing.T, session string) {
	t.Helper()
	testkit.Eventually(t, patience, session+" sleeps", func() bool {
		return r.ask(t, "observer-of-"+session, "waits %s", session) == "yes"
	})
}

func (r *redisson) wait(t *testing.T, answer <-chan string) string {
	t.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case said := <-answer:
		return said
	case <-r.process.Done():
		t.Fatalf("Java ended: %v", r.process.Wait())
	case <-timer.C:
		t.Fatalf("no answer from Java within %v", patience)
	}
	return ""
}

// answers splits the output of the Java process: the first word of each line is the session that it
// answers.
type answers struct {
	mu   sync.Mutex
	line []byte // incomplete
	due  map[string]chan string
}

// expect returns a channel for the next answer of the session. It is buffered, so the answer may be
// ignored.
func (a *answers) expect(session string) <-chan string {
	answer := make(chan string, 1)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.due[session] = answer
	return answer
}

// Write implements io.Writer.
func (a *answers) Write(p []byte) (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.line = append(a.line, p...)
	for {
		line, rest, whole := bytes.Cut(a.line, []byte("\n"))
		if !whole {
			return len(p), nil
		}
		session, answer, _ := strings.Cut(string(line), " ")
		if due := a.due[session]; due != nil {
			due <- answer
			delete(a.due, session)
		}
		a.line = rest
	}
}

// share is one side's part of a lock: the number of turns and the longest wait.
type share struct {
	Turns   int64 `json:"turns"`
	Longest int64 `json:"longest_ms"`
}

// Threads of Redisson and goroutines of one Locker take turns at a lock. A message wakes a
// goroutine sooner than a Java thread, so without the yield Go would have nearly all turns.
func TestRedissonWaitersGetTheirShareBesideGo(t *testing.T) {
	const seconds = 4
	java := startRedisson(t, beyond)
	for _, c := range []struct {
		threads, goroutines int
		hold                time.Duration
	}{
		{1, 1, time.Millisecond},
		{4, 4, time.Millisecond},
		{4, 4, 0},
		{16, 16, time.Millisecond},
		{4, 4, 10 * time.Millisecond},
		{1, 8, time.Millisecond},
	} {
		t.Run(fmt.Sprintf("%d beside %d, held for %v", c.threads, c.goroutines, c.hold), func(t *testing.T) {
			in := setupInterop(t)
			key := in.key("ann")
			ask := func(seconds int) <-chan string {
				return java.tell(key, "share %s %d %d %d", key, c.threads, c.hold.Microseconds(), seconds)
			}
			java.wait(t, ask(1)) // warms up
			answer := ask(seconds)
			ours := in.share(key, c.goroutines, c.hold, seconds*time.Second)
			var theirs share
			require.NoError(t, json.Unmarshal([]byte(java.wait(t, answer)), &theirs))
			part := float64(theirs.Turns) / float64(theirs.Turns+ours.Turns)
			fair := float64(c.threads) / float64(c.threads+c.goroutines)
			assert.Greater(t, part, fair/2, "%+v, Go %+v", theirs, ours)
			t.Logf("Redisson had %.0f %% of the turns: %+v, Go %+v", 100*part, theirs, ours)
		})
	}
}

func (in interop) share(key string, goroutines int, hold, during time.Duration) share {
	var s share
	var longest atomic.Int64
	end := time.Now().Add(during)
	var all sync.WaitGroup
	for range goroutines {
		all.Go(func() {
			for began := time.Now(); began.Before(end); began = time.Now() {
				err := in.locker.Do(in.ctx, key, func(context.Context) error {
					if waited := time.Since(began).Milliseconds(); waited > longest.Load() {
						longest.Store(waited)
					}
					if hold > 0 {
						<-time.After(hold)
					}
					atomic.AddInt64(&s.Turns, 1)
					return nil
				})
				if !assert.NoError(in.t, err) {
					return
				}
			}
		})
	}
	all.Wait()
	s.Longest = longest.Load()
	return s
}
