package testkit

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"

	"stampede/internal/dev/child"
	"stampede/reservation"
)

// stopWithin is how long a command may take to stop before the test kills it.
const stopWithin = time.Minute

// Cmd is the test binary, run as the program: with the code under test, and with -race if the tests have it.
type Cmd struct {
	t       testing.TB
	cmd     *exec.Cmd
	output  lines
	stdout  lines
	input   io.Writer
	tty     *os.File // the process's end of its terminal
	process *child.Process
}

// Command prepares to run the function of WithCommand in a new process. Its environment is that of the test
// without STAMPEDE_ variables. The process is killed at the end of the test or of the test process. Its
// output is logged if the test failed.
func Command(t testing.TB, args ...string) *Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := &Cmd{t: t, cmd: exec.Command(self, args...)}
	c.cmd.Stdout, c.cmd.Stderr = &c.output, &c.output
	c.cmd.Env = slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, "STAMPEDE_") })
	c.Setenv(envReexec, "1")
	c.Setenv("STAMPEDE_PROGRESS", "off") // a slow machine would add lines to the output
	return c
}

// Setenv sets a variable of the process's environment.
func (c *Cmd) Setenv(name, value string) { c.cmd.Env = append(c.cmd.Env, name+"="+value) }

// UseTerminal makes a terminal the standard output of the process. Output has its standard error only.
func (c *Cmd) UseTerminal(terminal *os.File) { c.cmd.Stdout = terminal }

// UseOutput makes a file the standard output and standard error of the process. Output has nothing then.
func (c *Cmd) UseOutput(f *os.File) { c.cmd.Stdout, c.cmd.Stderr = f, f }

// LimitFiles bounds the open files of the process. Call it before Start.
func (c *Cmd) LimitFiles(n int) { c.FromShell(fmt.Sprintf("ulimit -n %d", n)) }

// FromShell has the process started by a shell, behind this command. Call it once, before Start.
func (c *Cmd) FromShell(first string) {
	c.cmd.Args = append([]string{"sh", "-c", first + ` && exec "$0" "$@"`, c.cmd.Path}, c.cmd.Args[1:]...)
	c.cmd.Path = "/bin/sh"
}

// UseServers points the process to the test's Redis, keys and database.
func (c *Cmd) UseServers(keys reservation.Keys) {
	c.t.Helper()
	c.Setenv("REDIS_URL", RedisURL(c.t))
	c.Setenv("DATABASE_URL", DatabaseURL(c.t))
	c.Setenv("STAMPEDE_KEY_PREFIX", keys.Prefix)
	c.Setenv("STAMPEDE_PARTITIONS", strconv.Itoa(keys.Partitions))
}

// Input gives the process a standard input for WriteLine. Otherwise standard input is empty.
func (c *Cmd) Input() {
	c.t.Helper()
	var err error
	if c.input, err = c.cmd.StdinPipe(); err != nil {
		c.t.Fatal(err)
	}
}

// WriteLine writes a line to the standard input of the process. A frozen process reads it later.
func (c *Cmd) WriteLine(line string) {
	c.t.Helper()
	if _, err := io.WriteString(c.input, line+"\n"); err != nil {
		c.t.Fatal(err)
	}
}

// KeepStdout keeps what the process writes to standard output for Stdout. Call it before Start.
func (c *Cmd) KeepStdout() { c.cmd.Stdout = io.MultiWriter(&c.stdout, &c.output) }

// Stdout is what the process wrote so far to standard output, after KeepStdout.
func (c *Cmd) Stdout() string { return c.stdout.String() }

// Terminal gives the process a terminal, whose input WriteLine types. Call it before Start.
func (c *Cmd) Terminal() {
	c.t.Helper()
	master, tty, err := pty.Open()
	if err != nil {
		c.t.Fatal(err)
	}
	c.input, c.tty = master, tty
	c.cmd.Stdin, c.cmd.Stdout, c.cmd.Stderr = tty, tty, tty
	var reading sync.WaitGroup
	reading.Go(func() { _, _ = io.Copy(&c.output, master) }) // ends with an error when the process has closed its end
	c.t.Cleanup(func() {
		_ = tty.Close()
		reading.Wait()
		_ = master.Close()
	})
}

// Start starts the process.
func (c *Cmd) Start() {
	c.t.Helper()
	process, err := child.Start(c.cmd, syscall.SIGKILL)
	if err != nil {
		c.t.Fatal(err)
	}
	c.process = process
	if c.tty != nil {
		_ = c.tty.Close() // so that the terminal ends with the process
	}
	c.t.Cleanup(func() {
		c.Kill()
		if c.t.Failed() {
			c.t.Logf("output of %s (%v):\n%s", strings.Join(c.cmd.Args[1:], " "), c.cmd.ProcessState, c.Output())
		}
	})
}

// Pid is the process id.
func (c *Cmd) Pid() int { return c.process.Pid() }

// Output is what the process wrote so far to standard output and standard error.
func (c *Cmd) Output() string { return c.output.String() }

// WaitOutput waits until the process has written text, and returns the line with it.
func (c *Cmd) WaitOutput(within time.Duration, text string) string {
	c.t.Helper()
	var found string
	Eventually(c.t, within, "output "+text, func() bool {
		for line := range strings.Lines(c.Output()) {
			if strings.Contains(line, text) {
				found = strings.TrimSpace(line)
				return true
			}
		}
		return false
	})
	return found
}

// Freeze suspends the process by SIGSTOP, like a suspended machine: its connections stay open. A frozen
// process can be thawed or killed.
func (c *Cmd) Freeze() { c.process.Signal(syscall.SIGSTOP) }

// Thaw resumes a frozen process by SIGCONT.
func (c *Cmd) Thaw() { c.process.Signal(syscall.SIGCONT) }

// Kill ends the process by SIGKILL and waits for its end.
func (c *Cmd) Kill() { c.process.Stop(syscall.SIGKILL, stopWithin) }

// Stop sends SIGTERM, waits for the end of the process and returns its state. After stopWithin the process is killed.
func (c *Cmd) Stop() *os.ProcessState {
	c.process.Stop(syscall.SIGTERM, stopWithin)
	return c.cmd.ProcessState
}

// Done is closed when the process has ended.
func (c *Cmd) Done() <-chan struct{} { return c.process.Done() }

// Wait waits for the end of the process and returns its state.
func (c *Cmd) Wait(within time.Duration) *os.ProcessState {
	c.t.Helper()
	select {
	case <-c.process.Done():
	case <-time.After(within):
		c.t.Fatalf("not within %v: the end of %s", within, strings.Join(c.cmd.Args[1:], " "))
	}
	return c.cmd.ProcessState
}

// WaitKilled waits for the end of the process by SIGKILL, as at a crash point. It fails the test if the
// process ends otherwise.
func (c *Cmd) WaitKilled(within time.Duration) {
	c.t.Helper()
	state := c.Wait(within)
	if status, ok := state.Sys().(syscall.WaitStatus); !ok || !status.Signaled() || status.Signal() != syscall.SIGKILL {
		c.t.Fatalf("%s ended with %v, want SIGKILL", strings.Join(c.cmd.Args[1:], " "), state)
	}
}

// lines collects output. It is safe for concurrent use.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write implements io.Writer.
func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}
