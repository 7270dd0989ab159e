//go:build !linux

package accept

import (
	"errors"
	"net"
	"time"
)

// stampArrivals does nothing: only Linux notes when bytes arrive.
func stampArrivals(net.Listener) {}

type arrivals struct{}

func (*arrivals) init(*net.TCPConn) {}

func (*arrivals) read(conn *net.TCPConn, p []byte) (int, error) { return conn.Read(p) }

func (*arrivals) arrived() (at time.Time, left bool) { return time.Time{}, false }

func (*arrivals) hasLeft() bool { return false }

func refuseHandshakes(*net.TCPListener) error { return errors.ErrUnsupported }
