package rig

import (
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/bench/designs"
	"stampede/bench/front"
	"stampede/bench/httpload"
	"stampede/internal/dev/crowd"
	"stampede/reservation"
)

const adminToken = "token-of-the-operators"

// Stampede is the product as processes: `stampede serve` and `stampede work`.
type Stampede struct {
	Partitions int // 0 means the default
	Workers    int // 0 means one
	// Env are additional settings as NAME=value: STAMPEDE_BATCH_MAX=100.
	Env []string
}

// Start starts Stampede with a sale that is open when it returns.
func (c Stampede) Start(b testing.TB, stock int64) *System {
	b.Helper()
	s := &System{Shop: Open(b), b: b}
	s.launch = func() { c.launch(s) }
	s.launch()
	b.Cleanup(s.Close)
	var err error
	s.Sale, err = crowd.CreateSale(b.Context(), "http://"+s.Fronts[0].Addr, adminToken,
		reservation.Terms{Name: "bench", Stock: stock})
	require.NoError(b, err)
	c.awaitOpen(s)
	return s
}

// launch starts the processes. Each has its own name and port, and the names are the same after a
// restart, as under a supervisor.
func (c Stampede) launch(s *System) {
	s.b.Helper()
	env := append([]string{
		"REDIS_URL=" + s.Shop.RedisURL, "DATABASE_URL=" + s.Shop.DatabaseURL, "STAMPEDE_KEY_PREFIX=" + s.Shop.prefix,
		fmt.Sprint("STAMPEDE_PARTITIONS=", max(1, c.Partitions)),
		"STAMPEDE_AUTH=header", "STAMPEDE_ADMIN_TOKEN=" + adminToken,
		"STAMPEDE_HTTP_ADDR=127.0.0.1:0", "STAMPEDE_METRICS_ADDR=127.0.0.1:0",
		"STAMPEDE_STOP_DELAY=0s",
	}, c.Env...)
	binary, err := buildBinary()
	require.NoError(s.b, err, "build Stampede")
	for i := range max(1, c.Workers) {
		s.Workers = append(s.Workers, Run(s.b, "stampede work", "msg=\"worker started\" consumer=",
			exec.Command(binary, "work"),
			append(env, fmt.Sprint("STAMPEDE_CONSUMER=worker-", i))...))
	}
	s.Fronts = append(s.Fronts, Run(s.b, "stampede serve", "msg=\"ingress listens\" addr=",
		exec.Command(binary, "serve"), env...))
	if s.Sale != [16]byte{} {
		c.awaitOpen(s)
	}
}

// awaitOpen waits until every front sells: a worker must first verify the partition. It requests more
// units than an order may hold, which sells nothing.
func (c Stampede) awaitOpen(s *System) {
	s.b.Helper()
	const refused = http.StatusUnprocessableEntity
	deadline := time.Now().Add(startWithin)
	for _, p := range s.Fronts {
		probe := httpload.Load{
			Addrs: []string{p.Addr}, Connections: 1, For: time.Second, Most: 1, Status: refused,
			Request: func(dst []byte, _ uint64) []byte {
				return append(dst, PurchaseHead(s.Sale)+"probe"+strings.Replace(PurchaseEnd, "1", "2", 1)...)
			},
		}
		for answers := s.Measure(probe); answers.Wanted == 0; answers = s.Measure(probe) {
			if time.Now().After(deadline) {
				s.b.Fatalf("the sale was not open within %v: %s", startWithin, answers)
			}
		}
	}
}

// buildBinary builds Stampede once, from the sources that this module's go.mod replaces it with.
var buildBinary = sync.OnceValues(func() (path string, err error) {
	folder, err := os.MkdirTemp("", "stampede-bench-")
	if err != nil {
		return "", err
	}
	AtExit(func() { _ = os.RemoveAll(folder) })
	path = filepath.Join(folder, "stampede")
	build := exec.Command("go", "build", "-o", path, "./cmd/stampede")
	build.Dir = "../.." // a package's benchmarks run in its folder
	build.Stderr = os.Stderr
	return path, build.Run()
})

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
	maps.Copy(spec.Backend.Options, entry.Options)
	maps.Copy(spec.Backend.Options, options)
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
