//go:build redisson

package lock_test

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/child"
	"stampede/internal/testkit"
)

// redisson is a Java process that uses Redisson's locks as it is told; see its Driver.java.
type redisson struct {
	in      io.Writer
	process *child.Process
	output  *answers
}

// startRedisson is given the lease that Redisson's watchdog keeps up, and its server if that is not the one
// that the tests share.
func startRedisson(t *testing.T, watchdog time.Duration, server ...string) *redisson {
	t.Helper()
	const target = "testdata/redisson/target"
	classpath, err := os.ReadFile(target + "/classpath")
	require.NoError(t, err, "task test:redisson builds it")
	// The compiler that warms up fast, and one thread to collect: it is one of several processes.
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

// tell gives a session a command, and returns where its answer will be.
func (r *redisson) tell(session, format string, args ...any) <-chan string {
	answer := r.output.expect(session)
	// If the process is gone there is no answer, which is found then.
	_, _ = fmt.Fprintf(r.in, "%s "+format+"\n", append([]any{session}, args...)...)
	return answer
}

func (r *redisson) ask(t *testing.T, session, format string, args ...any) string {
	t.Helper()
	return r.wait(t, r.tell(session, format, args...))
}

// waitAsleep waits until a session has looked for a lock in vain and sleeps: what it gets from then on, it
// was woken for.
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

// answers takes what the Java process writes apart: the first word of each line is the session that it
// answers for.
type answers struct {
	mu   sync.Mutex
	line []byte // so far
	due  map[string]chan string
}

// expect returns where the next answer of the session will be. It has room for it, so nobody has to take it.
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
