//go:build system

package main

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/catalog"
)

// An audit that waits for an order which no worker takes shows it, beside the result.
func TestProgressStaysOutOfResult(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	store := reservation.NewStore(testkit.Redis(t), s.keys, reservation.StoreOptions{})
	t.Cleanup(store.Close)
	sale, err := catalog.New(s.pool, store).Create(t.Context(), reservation.Terms{Name: "x", Stock: 5, PerOrderLimit: 1})
	require.NoError(t, err)
	answer, err := store.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: "ann", Quantity: 1})
	require.NoError(t, err)
	require.Equal(t, reservation.Reserved, answer.Verdict)
	const shown = " s  waiting until no order is in flight: 1 entries left"

	audit := s.command("audit", "--wait=4s", "--output=json")
	audit.Setenv("STAMPEDE_PROGRESS", "on")
	audit.KeepStdout()
	audit.Start()
	assert.Equal(t, exitFailed, audit.Wait(within).ExitCode())
	assert.Contains(t, audit.Output(), shown)
	require.Len(t, objects(t, audit.Stdout()), 1)

	quiet := s.command("audit", "--wait=4s", "--progress=off")
	quiet.Start()
	assert.Equal(t, exitFailed, quiet.Wait(within).ExitCode())
	assert.NotContains(t, quiet.Output(), shown)

	terminal := s.command("audit", "--wait=60s")
	terminal.Setenv("STAMPEDE_PROGRESS", "on")
	terminal.Terminal()
	terminal.Start()
	terminal.WaitOutput(within, "\x1b[K   3"+shown)
	assert.Equal(t, exitUnknown, terminal.Stop().ExitCode())
}
