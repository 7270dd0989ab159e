//go:build system

package main

import (
	"bytes"
	"net"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/pg"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

func TestHelpWithoutCommand(t *testing.T) {
	t.Parallel()
	for name, args := range map[string][]string{"Usage: stampede": nil, "stampede ": {"--version"}} {
		var out, errs bytes.Buffer
		assert.Equal(t, exitOK, run(args, &out, &errs), args)
		assert.True(t, strings.HasPrefix(out.String(), name), out.String())
		assert.Empty(t, errs.String())
	}
	var flag, command, errs bytes.Buffer
	run([]string{"--version"}, &flag, &errs)
	run([]string{"version"}, &command, &errs)
	assert.Equal(t, command.String(), flag.String())
}

func TestInvalidSaleIDIsUsageError(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"sale", "show", "nonsense"},
		{"sale", "pause", "nonsense"},
		{"sale", "restock", "nonsense", "5"},
		{"sale", "list", "--after=nonsense"},
		{"audit", "--sale=nonsense"},
		{"rebuild", "--sale=nonsense"},
		{"reconcile", "--sale=nonsense"},
		{"doctor", "--sale=nonsense"},
		{"load", "--sale=nonsense"},
	} {
		var out, errs bytes.Buffer
		assert.Equal(t, exitUsage, run(args, &out, &errs), args)
		assert.Contains(t, errs.String(), `"nonsense" is not a sale id`, args)
		assert.Equal(t, 1, strings.Count(errs.String(), "\n"), errs.String())
	}
}

func TestTakenPortNamesSetting(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	taken, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = taken.Close() })
	for _, c := range []struct{ command, variable, flag string }{
		{"serve", "STAMPEDE_HTTP_ADDR", "--http-addr"},
		{"dev", "STAMPEDE_HTTP_ADDR", "--http-addr"},
		{"work", "STAMPEDE_METRICS_ADDR", "--metrics-addr"},
	} {
		cmd := s.command(c.command, c.flag+"="+taken.Addr().String())
		if c.command == "serve" {
			cmd.Setenv("STAMPEDE_AUTH", "header")
		}
		cmd.Start()
		assert.Equal(t, exitFailed, cmd.Wait(within).ExitCode(), c.command)
		assert.Contains(t, cmd.Output(), taken.Addr().String(), c.command)
		assert.Contains(t, cmd.Output(), "address already in use: set "+c.variable+" ("+c.flag+") to another address",
			c.command)
	}
}

func TestDevPrintsEnvironmentForSecondTerminal(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	dev := s.command("dev", "--http-addr=127.0.0.1:0")
	dev.Start()
	line := dev.WaitOutput(within, "export REDIS_URL=")
	found := regexp.MustCompile(`^export REDIS_URL='([^']+)' DATABASE_URL='([^']+)'$`).FindStringSubmatch(line)
	require.Len(t, found, 3, line)
	list := testkit.Command(t, "sale", "list")
	list.Setenv("REDIS_URL", found[1])
	list.Setenv("DATABASE_URL", found[2])
	list.Start()
	assert.Equal(t, exitOK, list.Wait(within).ExitCode(), list.Output())
	assert.Equal(t, `'a'\''b'`, quoted("a'b"))
	assert.Equal(t, exitOK, dev.Stop().ExitCode())
}

func TestDevTakesTokensAndOrigins(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	dev := s.command("dev", "--http-addr=127.0.0.1:0", "--auth=jwt", "--jwt-secret="+strings.Repeat("s", 32),
		"--cors-origins=https://shop.example")
	dev.Start()
	url := strings.Fields(dev.WaitOutput(within, "ingress  "))[1]
	dev.WaitOutput(within, "-H 'Authorization: Bearer TOKEN'")
	ask, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+"/v1/orders", nil)
	require.NoError(t, err)
	ask.Header.Set("Origin", "https://shop.example")
	ask.Header.Set("X-User-ID", "ada")
	answer, err := http.DefaultClient.Do(ask)
	require.NoError(t, err)
	require.NoError(t, answer.Body.Close())
	assert.Equal(t, http.StatusUnauthorized, answer.StatusCode)
	assert.Equal(t, "https://shop.example", answer.Header.Get("Access-Control-Allow-Origin"))
	assert.Equal(t, exitOK, dev.Stop().ExitCode())

	output := s.ends(exitUsage, "dev", "--http-addr=127.0.0.1:0", "--auth=jwt")
	assert.Contains(t, output, "auth mode jwt needs STAMPEDE_JWT_SECRET")
}

// A Redis of 8 MB is too small for a hundred million units.
func TestDoctorComparesMemoryWithUnitsOnSale(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	own := testkit.OwnRedis(t)
	s.redisURL = own.URL
	rdb, err := connect.Control(own.URL)
	require.NoError(t, err)
	t.Cleanup(func() { _ = rdb.Close() })
	require.NoError(t, rdb.ConfigSet(t.Context(), "maxmemory", "8mb").Err())
	store := reservation.NewStore(rdb, s.keys, reservation.StoreOptions{})
	t.Cleanup(store.Close)
	sales := catalog.New(s.pool, store)
	sale := func(stock int64) string {
		sale, err := sales.Create(t.Context(), reservation.Terms{Name: "x", Stock: stock, PerOrderLimit: 1})
		require.NoError(t, err)
		return "--sale=" + sale.ID.String()
	}
	fits := func(flags ...string) {
		t.Helper()
		output := s.ends(exitOK, append([]string{"doctor"}, flags...)...)
		assert.NotContains(t, output, "on sale, which")
	}
	small := sale(1000)
	fits()
	fits(small)
	huge := sale(order.MaxStock)
	for _, c := range []struct{ flag, units string }{{huge, "100,000,000"}, {"--output=json", "100,001,000"}} {
		output := s.ends(exitFailed, "doctor", c.flag)
		assert.Contains(t, output, c.units+" units are on sale, which take about 47,")
		assert.Contains(t, output, "of maxmemory, 8 MB")
	}
	fits(small)
	serve, _ := s.serve()
	assert.Contains(t, serve.Output(), "UNSAFE SETTING: 100,001,000 units are on sale")

	s.ends(exitOK, "sale", "end", strings.TrimPrefix(huge, "--sale="))
	fits()
	fits(huge)
	output := s.ends(exitFailed, "doctor", "--sale="+uuid.Must(uuid.NewV7()).String())
	assert.Contains(t, output, "sale not found")
}

func TestUndecidedErrorsNameIdempotencyKey(t *testing.T) {
	t.Parallel()
	for err, repeat := range map[error]bool{
		reservation.ErrUnavailable: true, pg.ErrChangeUnknown: true, catalog.ErrRestockUndecided: true,
		catalog.ErrNotInForce:       true,
		catalog.ErrRestockWithdrawn: false, reservation.ErrSaleNotFound: false,
		catalog.ErrIdempotencyKeyReused: false,
	} {
		got := mayBeDone(err, "k")
		require.ErrorIs(t, got, err)
		assert.Equal(t, repeat, strings.Contains(got.Error(), "repeat it with --idempotency-key=k"), got)
	}
	assert.NoError(t, mayBeDone(nil, "k"))
}
