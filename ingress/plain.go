package ingress

import (
	"context"
	"net"
	"net/http"
)

var saleParam = []string{"sale"}

// newPlainFront returns the front of this server, or nil if no request can be a plain purchase.
func (s *Server) newPlainFront(ctx context.Context, addr net.Addr) *PlainFront {
	buyer := s.config.AuthHeader
	if s.config.Auth == AuthJWT {
		buyer = "Authorization"
	}
	return NewPlainFront(ctx, addr, PlainConfig{
		Buyer: buyer, Handler: s.plainHandler, Traced: s.config.Tracer != nil, Logger: s.log,
	})
}

// plainHandler answers the plain purchases of a connection by the handler of their route.
func (s *Server) plainHandler(w http.ResponseWriter, r *http.Request) func(sale string) {
	c := s.echo.NewContext(r, w)
	var param [1]string
	return func(sale string) {
		s.metrics.plainPurchases.Inc()
		if s.cors != nil {
			s.cors.allow(w.Header(), r.Header["Origin"])
		}
		c.Reset(r, w)
		c.SetPath(purchasePath)
		param[0] = sale
		c.SetParamNames(saleParam...)
		c.SetParamValues(param[:]...)
		_ = s.servePurchase(c) // it answers its errors itself
	}
}
