// Package redisson runs a real Redisson in a Java process that takes and releases locks on command.
// lock/testdata/redisson/…/Driver.java describes the commands.
package redisson

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"stampede/internal/dev/child"
)

// QuickStart are options of Java that select the fast compiler and a single collector thread. In turns
// of seconds the optimizing compiler would run most of the time, on cores that everything shares.
var QuickStart = []string{"-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"}

// stopWithin is how long the Java process may take to end.
const stopWithin = 5 * time.Second

// Redisson is the Java process. It is safe for concurrent use.
type Redisson struct {
	in      io.WriteCloser
	process *child.Process
	// ended is closed when the process sends no more answers, and err is the reason.
	ended chan struct{}
	err   error

	mu sync.Mutex
	// sessions are the threads of the Java process. Those in free hold no lock and wait for none.
	sessions, free []*session
}

// session is a thread of the Java process: in Redisson, a thread is the owner of a lock.
type session struct {
	name   string
	answer chan string // of the one command in progress
}

// Start starts Java with the program in the class path, connected to that Redis. Redisson's watchdog
// renews leases of the given length; everything else is its default.
func Start(classPath, redisURL string, lease time.Duration, options ...string) (*Redisson, error) {
	cmd := exec.Command("java", append(slices.Clone(options), "-cp", classPath, "stampede.Driver",
		redisURL, strconv.FormatInt(lease.Milliseconds(), 10))...)
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	// Not cmd.StdoutPipe, which is closed when the process ends, even with unread output.
	out, write := io.Pipe()
	cmd.Stdout, cmd.Stderr = write, os.Stderr
	process, err := child.Start(cmd, syscall.SIGKILL)
	if err != nil {
		return nil, err
	}
	go func() { _ = write.CloseWithError(errors.Join(process.Wait(), io.EOF)) }()
	r := &Redisson{in: in, process: process, ended: make(chan struct{})}
	answers := bufio.NewScanner(out)
	if !answers.Scan() || answers.Text() != "ready" {
		r.Stop()
		err := errors.Join(answers.Err(), process.Wait())
		return nil, fmt.Errorf("redisson printed %q, want \"ready\": %w", answers.Text(), err)
	}
	go r.read(answers)
	return r, nil
}

// Stop ends the process, which does not release its locks.
func (r *Redisson) Stop() {
	_ = r.in.Close() // ends the program
	r.process.Stop(syscall.SIGTERM, stopWithin)
}

func (r *Redisson) read(answers *bufio.Scanner) {
	for answers.Scan() {
		name, answer, _ := strings.Cut(answers.Text(), " ")
		if s := r.session(name); s != nil {
			s.answer <- answer
		}
	}
	r.err = errors.Join(errors.New("the Java process has ended"), answers.Err())
	close(r.ended)
}

func (r *Redisson) session(name string) *session {
	i, err := strconv.Atoi(name)
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil || i < 0 || i >= len(r.sessions) {
		return nil
	}
	return r.sessions[i]
}

// takeSession returns a free session, or a new one.
func (r *Redisson) takeSession() *session {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := len(r.free); n > 0 {
		s := r.free[n-1]
		r.free = r.free[:n-1]
		return s
	}
	s := &session{name: strconv.Itoa(len(r.sessions)), answer: make(chan string, 1)}
	r.sessions = append(r.sessions, s)
	return s
}

func (r *Redisson) freeSession(s *session) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.free = append(r.free, s)
}

// Lock waits for a lock, which the watchdog renews until unlock. If ctx ends first, the lock is
// released as soon as the waiting thread gets it: Redisson's lock() cannot be canceled.
func (r *Redisson) Lock(ctx context.Context, key string) (unlock func() error, err error) {
	s := r.takeSession()
	if err := r.send(s, "lock "+key); err != nil {
		return nil, err
	}
	err = r.await(ctx, s, "held")
	switch {
	case err == nil:
		return func() error { return r.unlock(s, key) }, nil
	case ctx.Err() == nil:
		r.freeSession(s)
		return nil, err
	}
	go func() {
		if r.await(context.Background(), s, "held") == nil {
			_ = r.unlock(s, key) // no caller is left to receive the error
		}
	}()
	return nil, ctx.Err()
}

func (r *Redisson) unlock(s *session, key string) error {
	if err := r.send(s, "unlock "+key); err != nil {
		return err
	}
	err := r.await(context.Background(), s, "released")
	r.freeSession(s)
	return err
}

// Ask runs a command of the program and returns its answer.
func (r *Redisson) Ask(ctx context.Context, command string) (string, error) {
	s := r.takeSession()
	defer r.freeSession(s)
	if err := r.send(s, command); err != nil {
		return "", err
	}
	return r.answer(ctx, s)
}

func (r *Redisson) send(s *session, command string) error {
	// One write per line: the pipe keeps concurrent writes apart.
	if _, err := io.WriteString(r.in, s.name+" "+command+"\n"); err != nil {
		return fmt.Errorf("redisson: %s: %w", command, err)
	}
	return nil
}

// await waits for an answer of a session.
func (r *Redisson) await(ctx context.Context, s *session, want string) error {
	answer, err := r.answer(ctx, s)
	if err == nil && answer != want {
		err = fmt.Errorf("redisson: want %s, got %s", want, answer)
	}
	return err
}

func (r *Redisson) answer(ctx context.Context, s *session) (string, error) {
	select {
	case answer := <-s.answer:
		return answer, nil
	case <-r.ended:
		return "", r.err
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

// programPath is the folder of the Java program in the repository, and pom its Maven file.
var programPath = filepath.Join("lock", "testdata", "redisson")

const pom = "pom.xml"

// Compile compiles what has changed of the Java program, and returns its class path. The error says
// what is missing if that is not possible.
var Compile = sync.OnceValues(func() (string, error) {
	for _, tool := range []string{"java", "mvn"} {
		if _, err := exec.LookPath(tool); err != nil {
			return "", fmt.Errorf("%s is not installed", tool)
		}
	}
	folder, err := findFolder()
	if err != nil {
		return "", err
	}
	unlock, err := lockFolder(folder)
	if err != nil {
		return "", err
	}
	defer unlock()
	maven := exec.Command("mvn", "--quiet", "--batch-mode", "compile")
	maven.Dir = folder
	if output, err := maven.CombinedOutput(); err != nil {
		return "", fmt.Errorf("mvn compile: %w\n%s", err, output)
	}
	return readClassPath(folder)
})

// lockFolder prevents concurrent builds: the tests of several packages compile the program.
func lockFolder(folder string) (unlock func(), err error) {
	file, err := os.Open(filepath.Join(folder, pom))
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX); err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("lock %s: %w", file.Name(), err)
	}
	return func() { _ = file.Close() }, nil // unlocks it
}

// ClassPath is the class path of the program that Compile has built, in this process or another one.
func ClassPath() (string, error) {
	folder, err := findFolder()
	if err != nil {
		return "", err
	}
	return readClassPath(folder)
}

func readClassPath(folder string) (string, error) {
	output := filepath.Join(folder, "target")
	libraries, err := os.ReadFile(filepath.Join(output, "classpath"))
	if err != nil {
		return "", fmt.Errorf("the Java program is not compiled: %w", err)
	}
	return filepath.Join(output, "classes") + string(os.PathListSeparator) + strings.TrimSpace(string(libraries)), nil
}

// Version is the version of Redisson in the program, or "".
func Version() string {
	folder, err := findFolder()
	if err != nil {
		return ""
	}
	text, err := os.ReadFile(filepath.Join(folder, pom))
	if err != nil {
		return ""
	}
	_, rest, _ := strings.Cut(string(text), "<redisson.version>")
	version, _, _ := strings.Cut(rest, "</redisson.version>")
	return version
}

// findFolder looks for the program in the working directory and above: benchmarks run in the folder of
// their package.
func findFolder() (string, error) {
	at, err := os.Getwd()
	for ; err == nil; at = filepath.Dir(at) {
		found := filepath.Join(at, programPath)
		if _, err := os.Stat(filepath.Join(found, pom)); err == nil {
			return found, nil
		}
		if at == filepath.Dir(at) {
			err = errors.New("no folder " + programPath + " in a parent of the working directory")
		}
	}
	return "", err
}
