//go:build system

package main

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"stampede/internal/test/testkit"
)

// fullPipe returns both ends of a pipe without room.
func fullPipe(t *testing.T) (reader, writer *os.File) {
	t.Helper()
	reader, writer, err := os.Pipe()
	require.NoError(t, err)
	t.Cleanup(func() { _, _ = reader.Close(), writer.Close() })
	room, err := unix.FcntlInt(writer.Fd(), unix.F_GETPIPE_SZ, 0)
	require.NoError(t, err)
	_, err = writer.Write(bytes.Repeat([]byte{'\n'}, room))
	require.NoError(t, err)
	return reader, writer
}

// What reads the output of a process, and what a terminal sends when it closes, decide nothing: each process works on,
// counts the lines that it lost, and stops cleanly.
func TestProcessesDoNotDependOnWhoReadsTheirOutput(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		output func(t *testing.T) *os.File
		stop   []syscall.Signal
		lost   bool // already a few lines
	}{
		"nobody reads a full pipe": {
			output: func(t *testing.T) *os.File {
				t.Helper()
				_, writer := fullPipe(t)
				return writer
			},
			stop: []syscall.Signal{syscall.SIGTERM},
		},
		"the reader has gone": {
			output: func(t *testing.T) *os.File {
				t.Helper()
				reader, writer := fullPipe(t)
				require.NoError(t, reader.Close())
				return writer
			},
			stop: []syscall.Signal{syscall.SIGHUP, syscall.SIGHUP}, lost: true, // as a terminal that closes
		},
		"the disk is full": {
			output: func(t *testing.T) *os.File {
				t.Helper()
				full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
				require.NoError(t, err)
				t.Cleanup(func() { _ = full.Close() })
				return full
			},
			stop: []syscall.Signal{syscall.SIGTERM, syscall.SIGHUP}, lost: true, // as systemd with SendSIGHUP
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// The processes must not inherit that SIGHUP is ignored, as in tests that nohup has started.
			hangups := make(chan os.Signal, 1)
			signal.Notify(hangups, syscall.SIGHUP)
			t.Cleanup(func() { signal.Stop(hangups) })
			s := newShop(t)
			hook := newWebhookShop(t)
			s.ends(exitOK, "relay", "add", "shop", hook.url, "--secret-file", hook.secretFile, "--allow-private")
			s.ends(exitOK, "relay", "add", "blocked", "stdout")

			output := c.output(t)
			var processes []*testkit.Cmd
			start := func(p *testkit.Cmd, variable string) (url string) {
				addr := testkit.FreeAddr(t)
				p.Setenv(variable, addr)
				p.UseOutput(output)
				p.Start()
				processes = append(processes, p)
				testkit.Eventually(t, within, variable+" is ready", func() bool {
					status, _ := call(t, http.MethodGet, "http://"+addr+"/readyz", "")
					return status == http.StatusOK
				})
				return "http://" + addr
			}
			url := start(s.ingress(), "STAMPEDE_HTTP_ADDR")
			urls := []string{url, start(s.worker("worker"), "STAMPEDE_METRICS_ADDR")}
			relay := s.relay()
			relay.Setenv("STAMPEDE_DRAIN_TIMEOUT", "1s") // a stop waits so long for the reader of its events
			urls = append(urls, start(relay, "STAMPEDE_METRICS_ADDR"))
			desk := s.command("dashboard")
			desk.Setenv("STAMPEDE_ADMIN_TOKEN", adminToken)
			desk.Setenv("STAMPEDE_SCRAPE", url+"/metrics")
			urls = append(urls, start(desk, "STAMPEDE_DASHBOARD_ADDR"))

			sale := s.sale(url, 10)
			s.buy(url, sale, "ann")
			testkit.Eventually(t, within, "the order is confirmed, and the shop hears of it", func() bool {
				return hook.counts()["stampede.order.confirmed"] == 1
			})
			for _, url := range urls {
				shown := strings.Join(scrape(t, url), "\n")
				require.Contains(t, shown, "\nstampede_log_lines_lost_total ")
				require.Equal(t, !c.lost, strings.Contains(shown, "\nstampede_log_lines_lost_total 0\n"), url)
			}
			s.buy(url, sale, "bob") // a worker that stops finishes its batch
			for _, p := range processes {
				for _, signal := range c.stop {
					require.NoError(t, syscall.Kill(p.Pid(), signal))
				}
			}
			for _, p := range processes {
				require.Equal(t, exitOK, p.Wait(within).ExitCode())
			}
			s.worker("another").Start()
			s.ends(exitOK, "audit", "--wait=30s")
		})
	}
}

// What was written while nobody read comes when somebody does.
func TestLogComesWhenItIsRead(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	reader, writer := fullPipe(t)
	c, addr := s.ingress(), testkit.FreeAddr(t)
	c.Setenv("STAMPEDE_HTTP_ADDR", addr)
	c.UseOutput(writer)
	c.Start()
	require.NoError(t, writer.Close())
	testkit.Eventually(t, within, "it listens", func() bool {
		conn, err := net.Dial("tcp", addr) //nolint:noctx // it is closed at once
		return err == nil && conn.Close() == nil
	})
	read := make(chan string, 1)
	go func() {
		text, _ := io.ReadAll(reader)
		read <- string(text)
	}()
	require.Equal(t, exitOK, c.Stop().ExitCode())
	require.Contains(t, <-read, `msg="ingress listens"`)
}

// A process that nohup has started ignores SIGHUP.
func TestNohupIsKept(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	c := s.ingress()
	c.FromShell("trap '' HUP")
	c.Start()
	c.WaitOutput(within, "ingress listens")
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.Pid()))
	require.NoError(t, err)
	_, ignored, _ := strings.Cut(string(status), "SigIgn:")
	var signals uint64
	_, err = fmt.Sscanf(ignored, "%x", &signals)
	require.NoError(t, err)
	require.NotZero(t, signals&(1<<(syscall.SIGHUP-1)))
}
