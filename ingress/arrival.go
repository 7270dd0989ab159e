package ingress

import (
	"net/http"

	"github.com/labstack/echo/v4"

	"stampede/internal/accept"
)

// arrivalOf is the arrival of what has been read of a request. A plain purchase has been read whole, and has the clock
// that was read for it.
func arrivalOf(c echo.Context) accept.Arrival {
	if a, ok := c.Response().Writer.(*plainAnswer); ok {
		return a.arrival
	}
	return accept.ArrivalOf(c.Request())
}

// handlePost serves a call that changes something. It is not carried out late, as by an ingress that was frozen: its
// client may have done the opposite through another one since. Purchases are decided in a queue, which looks then.
func (s *Server) handlePost(path string, h echo.HandlerFunc) {
	s.handle(http.MethodPost, path, func(c echo.Context) error {
		if arrivalOf(c).IsLate() {
			return problemOverloaded
		}
		return h(c)
	})
}
