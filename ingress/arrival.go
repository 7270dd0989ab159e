package ingress

import (
	"context"
	"net"
	"time"

	"github.com/labstack/echo/v4"
)

// arrivingConn is a connection that knows when the bytes arrived that were read last, as those of package accept do.
type arrivingConn interface{ Arrived() time.Time }

type arrivingConnKey struct{}

// withArrivals is for http.Server.ConnContext: requests find their connection.
func withArrivals(ctx context.Context, c net.Conn) context.Context {
	if c, ok := c.(arrivingConn); ok {
		return context.WithValue(ctx, arrivingConnKey{}, c)
	}
	return ctx
}

// beginning is when the request had been read, and how long the newest bytes of the connection have waited for that
// since they arrived at this machine: in the kernel for the connection to be accepted and to be read, and for a
// processor. It is negative if that is unknown. A plain purchase has the clock that was read for it.
func beginning(c echo.Context) (began time.Time, waited time.Duration) {
	if a, ok := c.Response().Writer.(*plainAnswer); ok {
		return a.began, a.waited
	}
	began = time.Now()
	conn, _ := c.Request().Context().Value(arrivingConnKey{}).(arrivingConn)
	return began, waitedUntil(began, conn)
}

const waitUnknown = -1

func waitedUntil(began time.Time, conn arrivingConn) time.Duration {
	if conn == nil {
		return waitUnknown
	}
	arrived := conn.Arrived()
	if arrived.IsZero() {
		return waitUnknown
	}
	return max(0, began.Sub(arrived)) // the clock may have been set back
}
