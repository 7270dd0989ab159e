package rig

import (
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/bench/designs"
	"stampede/bench/front"
)

// StartDesign starts a design of the ladder with a sale. The options are added to the design's own.
func StartDesign(b testing.TB, name string, options map[string]string, stock int64) *System {
	b.Helper()
	entry, found := designs.All[name]
	require.True(b, found, "unknown design %q", name)
	shop := Open(b)
	s := &System{Shop: shop, b: b}
	s.Sale = shop.InsertSale(stock)
	if !entry.Guarded {
		shop.dropGuard()
	}
	spec := front.Spec{
		Design: name, Sale: s.Sale, Stock: stock, Addr: "127.0.0.1:0",
		Backend: front.Backend{
			RedisURL: shop.RedisURL, DatabaseURL: shop.DatabaseURL, Prefix: shop.prefix,
			Options: map[string]string{},
		},
	}
	for _, more := range []map[string]string{entry.Options, options} {
		for key, value := range more {
			spec.Backend.Options[key] = value
		}
	}
	variable, err := spec.Environ()
	require.NoError(b, err)
	self, err := os.Executable()
	require.NoError(b, err)
	s.launch = func() {
		for range max(1, entry.Fronts) {
			s.Fronts = append(s.Fronts, Run(b, name, front.AddressLine, exec.Command(self), variable))
		}
	}
	s.launch()
	b.Cleanup(s.Close)
	return s
}
