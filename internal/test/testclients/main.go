// Command testclients runs the tests of clients/ against real servers: testclients PROGRAM COMMAND [ARGUMENT…] starts
// PROGRAM (a built stampede) as dev, and as serve with tokens, puts a proxy with faults in front, and runs COMMAND with
// their addresses in its environment. Its exit status is the command's.
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"stampede/internal/dev/child"
)

const (
	adminToken = "operator-of-the-tests"
	jwtSecret  = "a secret of the tests, 32 bytes or more"
	// startTimeout bounds the start of a server on a busy machine, with a new Postgres.
	startTimeout = 2 * time.Minute
	stopTimeout  = 20 * time.Second
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: testclients PROGRAM COMMAND [ARGUMENT…]")
		os.Exit(2)
	}
	ctx, restore := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := run(ctx, os.Args[1], os.Args[2], os.Args[3:])
	restore()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		os.Exit(max(exit.ExitCode(), 1))
	case err != nil:
		fmt.Fprintln(os.Stderr, "testclients:", err)
		os.Exit(1)
	}
}

// serversLine matches the command that stampede dev prints for a second terminal.
var serversLine = regexp.MustCompile(`REDIS_URL='([^']*)' DATABASE_URL='([^']*)'`)

func run(ctx context.Context, program, command string, arguments []string) error {
	program, err := filepath.Abs(program) // for tests in other folders
	if err != nil {
		return err
	}
	dev := exec.CommandContext(ctx, program, "dev", "--http-addr=127.0.0.1:0", "--admin-token="+adminToken)
	found, stop, err := start(dev, regexp.MustCompile(`ingress +(http://\S+)`), serversLine)
	if err != nil {
		return err
	}
	defer stop()
	header, redisURL, databaseURL := found[0][1], found[1][1], found[1][2]

	serve := exec.CommandContext(ctx, program, "serve", "--http-addr=127.0.0.1:0", "--stop-delay=0s",
		"--log-format=json", "--redis-url="+redisURL, "--database-url="+databaseURL, "--jwt-secret="+jwtSecret)
	found, stop, err = start(serve, regexp.MustCompile(`"addr":"([^"]+)"`))
	if err != nil {
		return err
	}
	defer stop()
	jwt := "http://" + found[0][1]

	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	faults := &http.Server{Handler: newProxy(header), ReadHeaderTimeout: startTimeout}
	go func() { _ = faults.Serve(listener) }()
	defer func() { _ = faults.Close() }()

	tests := exec.CommandContext(ctx, command, arguments...)
	tests.Stdout, tests.Stderr = os.Stdout, os.Stderr
	tests.Env = append(os.Environ(), "STAMPEDE_TEST_URL="+header, "STAMPEDE_TEST_JWT_URL="+jwt,
		"STAMPEDE_TEST_JWT_SECRET="+jwtSecret, "STAMPEDE_TEST_ADMIN_TOKEN="+adminToken,
		"STAMPEDE_TEST_FAULTS_URL=http://"+listener.Addr().String(),
		"STAMPEDE_TEST_PROGRAM="+program, "REDIS_URL="+redisURL, "DATABASE_URL="+databaseURL)
	return tests.Run()
}

// start starts a server and waits until its output has matched all patterns. The output is kept for an error only.
func start(cmd *exec.Cmd, patterns ...*regexp.Regexp) (found [][]string, stop func(), err error) {
	output, input := io.Pipe()
	cmd.Stdout, cmd.Stderr = input, input
	process, err := child.Start(cmd, syscall.SIGTERM)
	if err != nil {
		return nil, nil, err
	}
	stop = func() { process.Stop(syscall.SIGTERM, stopTimeout) }
	go func() {
		<-process.Done()
		_ = input.Close()
	}()
	matched := make(chan [][]string, 1)
	var said strings.Builder // until all patterns have matched, or the output has ended
	go func() {
		defer close(matched)
		lines := bufio.NewScanner(output)
		for len(found) < len(patterns) && lines.Scan() {
			said.WriteString(lines.Text() + "\n")
			if match := patterns[len(found)].FindStringSubmatch(lines.Text()); match != nil {
				found = append(found, match)
			}
		}
		if err := lines.Err(); err != nil {
			said.WriteString(err.Error())
		}
		if len(found) == len(patterns) {
			matched <- found
		}
		_, _ = io.Copy(io.Discard, output)
	}()
	timeout := time.NewTimer(startTimeout)
	defer timeout.Stop()
	select {
	case all, ok := <-matched:
		if ok {
			return all, stop, nil
		}
		err = fmt.Errorf("%s ended:\n%s", strings.Join(cmd.Args[:2], " "), said.String())
	case <-timeout.C:
		err = fmt.Errorf("%s is not up after %v", strings.Join(cmd.Args[:2], " "), startTimeout)
	}
	stop()
	return nil, nil, err
}
