//go:build !linux

package accept

import (
	"errors"
	"net"
)

func refuseHandshakes(*net.TCPListener) error { return errors.ErrUnsupported }
