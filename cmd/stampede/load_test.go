//go:build system

package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

// loadCommand prepares a small crowd that authenticates with JWTs.
func loadCommand(t *testing.T) (*shop, *testkit.Cmd) {
	t.Helper()
	const secret = "a secret of at least thirty-two bytes"
	s := newShop(t)
	ingress := s.command("serve")
	ingress.Setenv("STAMPEDE_JWT_SECRET", secret)
	ingress.Setenv("STAMPEDE_JWT_ISSUER", "tests")
	ingress.Setenv("STAMPEDE_JWT_AUDIENCE", "stampede")
	ingress.Setenv("STAMPEDE_ADMIN_TOKEN", adminToken)
	ingress.Setenv("STAMPEDE_HTTP_ADDR", "127.0.0.1:0")
	ingress.Start()
	_, addr, _ := strings.Cut(ingress.WaitOutput(within, "ingress listens"), "addr=")
	addr, _, _ = strings.Cut(addr, " ")
	s.worker("worker").Start()

	load := s.command("load", "--stock=50", "--buyers=200", "--rate=400", "--double-clicks=0.2", "--patience=5s")
	load.Setenv("STAMPEDE_LOAD_URL", "http://"+addr)
	load.Setenv("STAMPEDE_JWT_SECRET", secret)
	load.Setenv("STAMPEDE_JWT_ISSUER", "tests")
	load.Setenv("STAMPEDE_JWT_AUDIENCE", "stampede")
	load.Setenv("STAMPEDE_ADMIN_TOKEN", adminToken)
	return s, load
}

func TestLoadVerifiesEveryOrderInPostgres(t *testing.T) {
	t.Parallel()
	_, load := loadCommand(t)
	load.Start()
	assert.Equal(t, exitOK, load.Wait(within).ExitCode())
	assert.Contains(t, load.Output(), "checked against Postgres, order by order: 50 accepted, 50 of them found")
	assert.Contains(t, load.Output(), "durable")
	assert.Equal(t, 7, strings.Count(load.Output(), " kept "), "the audit's promises")
}

func TestLoadFailsOnOrderOfAnotherUser(t *testing.T) {
	t.Parallel()
	s, load := loadCommand(t)
	_, err := s.pool.Exec(t.Context(), `
		CREATE FUNCTION steal() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.user_id = 'thief'; RETURN NEW; END $$;
		CREATE TRIGGER steal BEFORE INSERT ON orders FOR EACH ROW WHEN (NEW.sequence = 10) EXECUTE FUNCTION steal();`)
	require.NoError(t, err)
	load.Start()
	assert.Equal(t, exitFailed, load.Wait(within).ExitCode())
	assert.Contains(t, load.Output(), "1 altered")
	assert.Contains(t, load.Output(), "thief")
	assert.Contains(t, load.Output(), "BROKEN")
}
