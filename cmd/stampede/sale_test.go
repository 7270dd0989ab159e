//go:build system

package main

import (
	"regexp"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/catalog"
)

// A restock that fails halfway must be repeated with its key, even if the key was generated.
func TestFailedRestockPrintsRetry(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	own := testkit.OwnRedis(t)
	rdb, err := connect.Control(own.URL)
	require.NoError(t, err)
	t.Cleanup(func() { _ = rdb.Close() })
	store := reservation.NewStore(rdb, s.keys, reservation.StoreOptions{})
	t.Cleanup(store.Close)
	sales := catalog.New(s.pool, store)
	sale, err := sales.Create(t.Context(), reservation.Terms{Name: "a sale", Stock: 10, PerOrderLimit: 1})
	require.NoError(t, err)
	restock := func(flags ...string) (int, string) {
		c := s.command(append([]string{"sale", "restock", sale.ID.String(), "5"}, flags...)...)
		c.Setenv("REDIS_URL", own.URL)
		c.Start()
		return c.Wait(within).ExitCode(), c.Output()
	}

	own.Kill()
	status, output := restock()
	assert.Equal(t, exitFailed, status, output)
	flag := regexp.MustCompile(`--idempotency-key=[0-9a-f-]{36}`).FindString(output)
	require.NotEmpty(t, flag, output)
	require.NoError(t, own.Restart(t.Context()))
	testkit.VerifyServer(t, s.pool, store, 0)

	testkit.Eventually(t, within, "the same restock succeeds", func() bool {
		status, output = restock(flag)
		return status == exitOK
	})
	shown, err := sales.Show(t.Context(), sale.ID)
	require.NoError(t, err)
	assert.EqualValues(t, 15, shown.Available)

	status, output = restock("--idempotency-key=a space")
	assert.Equal(t, exitUsage, status)
	assert.NotContains(t, output, "repeat it", "nothing was added")
}

func TestRestockCommandLowersStock(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	store := reservation.NewStore(testkit.Redis(t), s.keys, reservation.StoreOptions{})
	t.Cleanup(store.Close)
	sale, err := catalog.New(s.pool, store).Create(t.Context(),
		reservation.Terms{Name: "a sale", Stock: 10, PerOrderLimit: 1})
	require.NoError(t, err)
	output := s.ends(exitOK, "sale", "restock", sale.ID.String(), "--output=json", "--", "-7")
	assert.Contains(t, output, `"stock":3,"available":3,`)
	_, err = store.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: "ann", Quantity: 1})
	require.NoError(t, err)
	_, err = store.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: "bob", Quantity: 1})
	require.NoError(t, err)
	output = s.ends(exitFailed, "sale", "restock", sale.ID.String(), "--", "-2")
	assert.Contains(t, output, "the 2 units that are taken")
	assert.NotContains(t, output, "repeat it")
	s.ends(exitUsage, "sale", "restock", sale.ID.String(), "--", "-3")
}
