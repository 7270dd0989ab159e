package ingress

import (
	"context"
	"errors"
	"net/http"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/internal/tracing"
	"stampede/reservation"
)

// errServer is the status of a span whose request was answered 5xx. The log has the cause.
var errServer = errors.New("the server is at fault")

// traced makes the span of a request that has a sampled parent. It is not called if tracing is off.
func (s *Server) traced(name, method, path string, h echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		r := c.Request()
		span := s.config.Tracer.Request(r.Header, name)
		if !span.On() {
			return h(c)
		}
		span.Text("http.request.method", method)
		span.Text("http.route", path)
		for i, param := range c.ParamNames() {
			if id, ok := parseID(c.ParamValues()[i]); ok {
				span.Text("stampede."+param+"_id", id.String())
			}
		}
		c.SetRequest(r.WithContext(span.In(r.Context())))
		defer func() {
			status := c.Response().Status
			span.Number("http.response.status_code", int64(status))
			if status >= http.StatusInternalServerError {
				span.Fail(errServer)
			}
			span.End()
		}()
		return h(c)
	}
}

// spanOf returns the span of a request.
func (s *Server) spanOf(r *http.Request) tracing.Span {
	if s.config.Tracer == nil {
		return tracing.Span{}
	}
	return tracing.Current(r.Context())
}

// noteAnswer notes what Redis has decided.
func noteAnswer(span tracing.Span, answer reservation.Answer) {
	span.Text("stampede.verdict", string(answer.Verdict))
	if answer.Reservation.OrderID != uuid.Nil {
		span.Text("stampede.order_id", answer.Reservation.OrderID.String())
	}
}

// detached returns a context with the span only: it does not end with the request.
func detached(span tracing.Span) context.Context { return span.In(context.Background()) }
