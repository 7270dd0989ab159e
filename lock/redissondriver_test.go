//go:build redisson

package lock_test

import (
	"bytes"
	"flag"
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
