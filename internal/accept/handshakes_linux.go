package accept

import (
	"net"

	"golang.org/x/sys/unix"
)

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
