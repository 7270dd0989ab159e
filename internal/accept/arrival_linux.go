package accept

import (
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// stampArrivals has the kernel note when bytes arrive on the connections of a listener, those that wait to be accepted
// included. Where that fails, the times are unknown.
func stampArrivals(l net.Listener) {
	tcp, ok := l.(*net.TCPListener)
	if !ok {
		return
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1)
	})
}

// arrivals reads from a connection, and notes when the newest of the bytes arrived in the kernel. Its memory is used
// for each read again. Reads follow one another, as those of http.Server do.
type arrivals struct {
	raw  syscall.RawConn
	call func(fd uintptr) (done bool) // receive, made once

	header  unix.Msghdr
	part    unix.Iovec
	control [8]uint64
	n       int
	errno   syscall.Errno

	at atomic.Int64 // in nanoseconds since 1970; 0 if unknown
}

func (a *arrivals) init(conn *net.TCPConn) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return
	}
	a.raw, a.call = raw, a.receive
}

// read reads as conn.Read does.
func (a *arrivals) read(conn *net.TCPConn, p []byte) (int, error) {
	if a.raw == nil || len(p) == 0 {
		return conn.Read(p)
	}
	a.part.Base = unsafe.SliceData(p)
	a.part.SetLen(len(p))
	err := a.raw.Read(a.call)
	a.part.Base = nil // the buffer is the caller's
	if err != nil {
		// Such an error names the operation raw-read; http.Server looks for read.
		if failed := (*net.OpError)(nil); errors.As(err, &failed) {
			err = failed.Err
		}
		return 0, readError(conn, err)
	}
	switch {
	case a.errno != 0:
		return 0, readError(conn, os.NewSyscallError("recvmsg", a.errno))
	case a.n == 0:
		return 0, io.EOF
	}
	return a.n, nil
}

func readError(conn *net.TCPConn, err error) error {
	return &net.OpError{Op: "read", Net: "tcp", Source: conn.LocalAddr(), Addr: conn.RemoteAddr(), Err: err}
}

// receive is false if nothing has arrived.
func (a *arrivals) receive(fd uintptr) bool {
	for {
		a.header = unix.Msghdr{Iov: &a.part, Control: (*byte)(unsafe.Pointer(&a.control))}
		a.header.SetIovlen(1)
		a.header.SetControllen(int(unsafe.Sizeof(a.control)))
		n, _, errno := syscall.Syscall(unix.SYS_RECVMSG, fd, uintptr(unsafe.Pointer(&a.header)), 0)
		switch errno {
		case syscall.EINTR:
			continue
		case syscall.EAGAIN:
			return false
		}
		if a.n, a.errno = int(n), errno; errno == 0 && n > 0 {
			a.at.Store(a.stamp())
			noteForRaceDetector(fd)
		}
		return true
	}
}

// stamp is the time of the message, in nanoseconds since 1970; 0 if it has none.
func (a *arrivals) stamp() int64 {
	if int(a.header.Controllen) < unix.CmsgLen(int(unsafe.Sizeof(unix.Timespec{}))) {
		return 0
	}
	control := (*unix.Cmsghdr)(unsafe.Pointer(&a.control))
	if control.Level != unix.SOL_SOCKET || control.Type != unix.SO_TIMESTAMPNS {
		return 0
	}
	return (*unix.Timespec)(unsafe.Add(unsafe.Pointer(&a.control), unix.CmsgLen(0))).Nano()
}

// arrived returns when the newest bytes of the last read arrived; zero if that is unknown.
func (a *arrivals) arrived() time.Time {
	if at := a.at.Load(); at != 0 {
		return time.Unix(0, at)
	}
	return time.Time{}
}
