package accept

import (
	"context"
	"net"
	"net/http"
	"time"
)

// Conn is what a Listener accepts, if it is a TCP connection.
type Conn interface {
	net.Conn
	// Changed receives the connection's state in the server.
	Changed(state http.ConnState)
	// Arrived returns when the newest bytes that were read arrived at this machine, also if they waited for the
	// connection to be accepted; zero if that is unknown. The client has left if it is known to have closed the
	// connection by then, or its own side of it.
	Arrived() (at time.Time, left bool)
	// HasLeft asks the kernel whether the client has left.
	HasLeft() bool
}

// LateAfter is the age at which a request to change something is not carried out any more. Its client may have given
// up, and have been answered by another process since.
const LateAfter = 2 * time.Second

// Arrival is when a request came, and whether its client still waited when it had been read. The zero value is of a
// request whose connection is not known.
type Arrival struct {
	// Read is when the request had been read.
	Read time.Time
	// At is when its last bytes arrived at this machine, and Read if that is not Known. It may be the time of later
	// bytes of the same client.
	At    time.Time
	Known bool
	Left  bool
	// Conn is nil if it is not known.
	Conn Conn
}

// arrivalOn returns the arrival of a request that has been read from a connection right now.
func arrivalOn(c Conn) Arrival {
	a := Arrival{Read: time.Now(), Conn: c}
	a.At = a.Read
	if c == nil {
		return a
	}
	at, left := c.Arrived()
	a.Left = left
	if a.Known = !at.IsZero(); a.Known {
		// At has a monotonic clock from here on. The other one may have been set back.
		a.At = a.Read.Add(-max(0, a.Read.Sub(at)))
	}
	return a
}

// IsLate reports whether the request is not to be carried out any more.
func (a Arrival) IsLate() bool { return a.Left || time.Since(a.At) > LateAfter }

type connKey struct{}

// ConnContext is for http.Server.ConnContext, so that Arrived finds the connection of a request.
func ConnContext(ctx context.Context, c net.Conn) context.Context {
	if c, ok := c.(Conn); ok {
		return context.WithValue(ctx, connKey{}, c)
	}
	return ctx
}

// Arrived returns the arrival of what has been read of a request until now. A plain purchase has been read whole, and
// has the clock that was read for it.
func Arrived(w http.ResponseWriter, r *http.Request) Arrival {
	if a, ok := w.(*plainAnswer); ok {
		return a.arrival
	}
	c, _ := r.Context().Value(connKey{}).(Conn)
	return arrivalOn(c)
}
