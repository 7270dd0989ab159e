package testkit

import (
	"fmt"
	"math/rand/v2"
	"net"
	"sync/atomic"
	"testing"
)

// Ports are below those that systems give to connections and to listeners on port 0, and those of private servers: none
// of them takes one before its process listens.
const portFirst, ports = 10_000, 5_000

// portsTaken begins at a random one, as several packages are tested at the same time.
var portsTaken = func() *atomic.Int64 {
	var n atomic.Int64
	n.Store(rand.Int64N(ports))
	return &n
}()

// FreeAddr returns an address to listen on, for a process that has to have the same one each time, or whose log cannot
// tell it. Each call returns another one.
func FreeAddr(t testing.TB) string {
	t.Helper()
	var err error
	for range ports {
		addr := fmt.Sprint("127.0.0.1:", portFirst+portsTaken.Add(1)%ports)
		var listener net.Listener
		if listener, err = new(net.ListenConfig).Listen(t.Context(), "tcp", addr); err == nil {
			_ = listener.Close() // nothing was accepted
			return addr
		}
	}
	t.Fatal("find a free port: ", err)
	return ""
}
