//go:build system

package main

import (
	"net/http"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

func TestDefaultLimits(t *testing.T) {
	t.Parallel()
	var flags cli
	parser, err := kong.New(&flags)
	require.NoError(t, err)
	_, err = parser.Parse([]string{"serve", "--redis-url=redis://localhost", "--database-url=postgres://localhost"})
	require.NoError(t, err)
	assert.Equal(t, clientFlags{UserRate: 5, UserBurst: 20, AddressBurst: 200, UserStreams: 16, AddressStreams: 1000},
		flags.Serve.clientFlags)
	assert.Equal(t, 5*time.Second, flags.Serve.StopDelay)
}

func TestUserRateLimit(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, url := s.serve("--user-rate=5/s")
	orders := url + "/v1/sales/" + s.sale(url, 10).String() + "/orders"
	require.Equal(t, http.StatusAccepted, ask(t, http.MethodPost, orders, "ann", "").HTTP)
	testkit.Eventually(t, within, "the user is limited", func() bool {
		for range 30 { // without a pause; after a long pause of the test machine, Eventually tries again
			if ask(t, http.MethodPost, orders, "ann", "").HTTP == http.StatusTooManyRequests {
				return true
			}
		}
		return false
	})
	assert.Equal(t, http.StatusAccepted, ask(t, http.MethodPost, orders, "bob", "").HTTP)
}
