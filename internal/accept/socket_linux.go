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
	raw syscall.RawConn
	// receive and ask, made once.
	call   func(fd uintptr) (done bool)
	asking func(fd uintptr)

	header  unix.Msghdr
	part    unix.Iovec
	control [8]uint64
	n       int
	errno   syscall.Errno

	at   atomic.Int64 // in nanoseconds since 1970; 0 if unknown
	left atomic.Bool  // the client has closed the connection, or its side of it
}

func (a *arrivals) init(conn *net.TCPConn) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return
	}
	a.raw, a.call, a.asking = raw, a.receive, a.ask
	// Each read tells how much is left to read. This is not inherited from the listener.
	_ = raw.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_INQ, 1) })
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
		if a.n, a.errno = int(n), errno; errno != 0 || n == 0 {
			a.left.Store(true)
			return true
		}
		stamp, more := a.messages()
		a.at.Store(stamp)
		if more {
			a.ask(fd)
		}
		noteForRaceDetector(fd)
		return true
	}
}

// messages returns the time of the bytes, in nanoseconds since 1970 and 0 if unknown, and whether there is more to
// read, be it the end of the stream.
func (a *arrivals) messages() (stamp int64, more bool) {
	const align = unix.SizeofPtr - 1
	for at := 0; at+unix.SizeofCmsghdr <= int(a.header.Controllen); {
		control := (*unix.Cmsghdr)(unsafe.Add(unsafe.Pointer(&a.control), at))
		data := unsafe.Add(unsafe.Pointer(control), unix.CmsgLen(0))
		switch {
		case control.Level == unix.SOL_SOCKET && control.Type == unix.SO_TIMESTAMPNS:
			stamp = (*unix.Timespec)(data).Nano()
		case control.Level == unix.SOL_TCP && control.Type == unix.TCP_CM_INQ:
			more = *(*int32)(data) != 0
		}
		at += (int(control.Len) + align) &^ align
	}
	return stamp, more
}

// ask asks the kernel whether the client has left. Then the time of the last read may be that of its FIN, but the
// kernel knows that of the last bytes.
func (a *arrivals) ask(fd uintptr) {
	var info unix.TCPInfo
	size := uint32(unsafe.Sizeof(info))
	_, _, errno := syscall.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.IPPROTO_TCP, unix.TCP_INFO,
		uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
	if errno == 0 && info.State != unix.BPF_TCP_ESTABLISHED {
		a.at.Store(time.Now().Add(-time.Duration(info.Last_data_recv) * time.Millisecond).UnixNano())
		a.left.Store(true)
	}
}

func (a *arrivals) hasLeft() bool {
	return a.left.Load() || a.raw != nil && (a.raw.Control(a.asking) != nil || a.left.Load())
}

// arrived returns when the newest bytes of the last read arrived, zero if that is unknown, and whether the client is
// known to have left.
func (a *arrivals) arrived() (at time.Time, left bool) {
	if stamp := a.at.Load(); stamp != 0 {
		at = time.Unix(0, stamp)
	}
	return at, a.left.Load()
}

// refuseHandshakes makes the kernel drop the first packet of each new handshake on this socket. Closing the listener
// instead would reset queued clients, which may have sent requests. A client whose packet was dropped repeats it after
// a second, and is refused then.
func refuseHandshakes(l *net.TCPListener) error {
	raw, err := l.SyscallConn()
	if err != nil {
		return err
	}
	// A filter of a TCP socket gets the packet from the TCP header on. Byte 13 of the header has the flags.
	const flags, syn, ack, all = 13, 0x02, 0x10, 0xffffffff
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: flags},
		{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: syn | ack},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: syn, Jt: 0, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0},
		{Code: unix.BPF_RET | unix.BPF_K, K: all},
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		failed = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
			&unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]})
	})
	if err != nil {
		return err
	}
	return failed
}
