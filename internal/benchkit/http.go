package benchkit

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// HTTPLoad is a closed loop of connections that each send a request as soon as the last one was
// answered. It writes and reads HTTP/1.1 by hand: net/http's client would cost more than the server
// under test, and they share the cores.
type HTTPLoad struct {
	Addr        string // host:port
	Connections int
	For         time.Duration
	// Request appends the nth request of all, head and body.
	Request func(dst []byte, n uint64) []byte
	// Status is the only status that counts; any other fails the benchmark.
	Status int
}

// Run returns how many requests were answered in a second.
func (l HTTPLoad) Run(b *testing.B) float64 {
	b.Helper()
	conns := make([]net.Conn, l.Connections)
	for i := range conns {
		conn, err := net.Dial("tcp", l.Addr)
		if err != nil {
			b.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		conns[i] = conn
	}
	var sent, answered atomic.Uint64
	failed := make(chan error, len(conns))
	began := time.Now()
	deadline := began.Add(l.For)
	var wg sync.WaitGroup
	for _, conn := range conns {
		wg.Go(func() {
			in := bufio.NewReaderSize(conn, 4<<10)
			var out []byte
			for time.Now().Before(deadline) {
				out = l.Request(out[:0], sent.Add(1))
				if _, err := conn.Write(out); err != nil {
					failed <- err
					return
				}
				if err := l.readAnswer(in); err != nil {
					failed <- err
					return
				}
				answered.Add(1)
			}
		})
	}
	wg.Wait()
	took := time.Since(began)
	select {
	case err := <-failed:
		b.Fatal(err)
	default:
	}
	return float64(answered.Load()) / took.Seconds()
}

func (l HTTPLoad) readAnswer(in *bufio.Reader) error {
	line, err := in.ReadSlice('\n')
	if err != nil {
		return err
	}
	if len(line) < 12 || string(line[9:12]) != strconv.Itoa(l.Status) {
		rest, _ := in.Peek(in.Buffered())
		return fmt.Errorf("answer %q, want status %d: %s", strings.TrimSpace(string(line)), l.Status, rest)
	}
	length := 0
	for {
		if line, err = in.ReadSlice('\n'); err != nil {
			return err
		}
		if len(line) <= 2 {
			break
		}
		if value, ok := bytes.CutPrefix(line, []byte("Content-Length: ")); ok {
			if length, err = strconv.Atoi(string(bytes.TrimSpace(value))); err != nil {
				return err
			}
		}
	}
	_, err = io.CopyN(io.Discard, in, int64(length))
	return err
}
