package testkit

import (
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// Stopped reports whether SIGSTOP has stopped a process. A signal takes effect after kill(2) has returned.
func Stopped(t testing.TB, pid int) bool {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Contains(string(stat), ") T ")
}

// SendLast sends text and closes this side of the connection, in one packet: a reader of the text may see both.
func SendLast(t testing.TB, conn net.Conn, text string) {
	t.Helper()
	tcp := conn.(*net.TCPConn)
	raw, err := tcp.SyscallConn()
	require.NoError(t, err)
	var failed error
	require.NoError(t, raw.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_CORK, 1)
	}))
	require.NoError(t, failed)
	_, err = io.WriteString(conn, text)
	require.NoError(t, err)
	require.NoError(t, tcp.CloseWrite())
}
