package rig

import (
	"fmt"
	"net/http"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

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
	binary := stampedeBinary(s.b)
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
