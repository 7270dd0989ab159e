package limits

import (
	"fmt"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/bench/rig"
)

const (
	// pendingOrders wait in the stream when they are measured, in entries of pendingInCall: about as many
	// as `serve` sends in a call when it has 256 connections.
	pendingOrders = 100_000
	pendingInCall = 52

	aofBytes, redisBytes = "AOF bytes", "Redis bytes"
)

// BenchmarkPending measures what an accepted order that no worker has read takes in Redis and in its log.
func BenchmarkPending(b *testing.B) {
	table := rig.Table{
		Title: "A pending order in Redis",
		Note: fmt.Sprintf("Bytes of the append-only file and of memory (used_memory) for each of %s accepted orders that no "+
			"worker has read: the buyer's entry, and the share of a stream entry of %d orders.",
			rig.Count(pendingOrders), pendingInCall),
		Head: []string{"user id", aofBytes, redisBytes},
	}
	var candidates []rig.Candidate
	lengths := []int{12, 36}
	name := func(length int) string { return strconv.Itoa(length) + " characters" }
	for _, length := range lengths {
		candidates = append(candidates, rig.Candidate{Name: name(length), Turn: pending(length)})
	}
	results := rig.Compare(b, candidates...)
	for _, length := range lengths {
		table.Rows = append(table.Rows,
			append([]string{name(length)}, results.Ranges(rig.Count, name(length), aofBytes, redisBytes)...))
	}
	results.Report(b, name(lengths[0]), aofBytes, "AOF-B/order")
	results.Report(b, name(lengths[0]), redisBytes, "Redis-B/order")
	rig.Put(table)
}

// pending measures with user ids of so many characters.
func pending(length int) turn {
	return func(b *testing.B, _ int) rig.Values {
		s := openShop(b)
		defer s.Close()
		orders := rig.Scale(b, pendingOrders, 1_000)
		requests := newRequests(s.sale, orders)
		for i := range requests {
			requests[i].user = fmt.Sprintf("%0*d", length, i)
		}
		read := func(section, name string) int64 {
			n, err := rig.InfoNumber(b.Context(), s.Redis, section, name)
			require.NoError(b, err)
			return n
		}
		aof, memory := read("Persistence", "aof_current_size"), read("Memory", "used_memory")
		reserved := s.reserveAll(b, requests, pendingInCall, 1, callGrace)
		require.EqualValues(b, orders, reserved)
		return rig.Values{
			aofBytes:   float64(read("Persistence", "aof_current_size")-aof) / float64(orders),
			redisBytes: float64(read("Memory", "used_memory")-memory) / float64(orders),
		}
	}
}
