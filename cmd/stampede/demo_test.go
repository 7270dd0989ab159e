package main

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/testkit"
)

func demoCommand(t *testing.T) *testkit.Cmd {
	t.Helper()
	c := testkit.Command(t, "demo", "--stock=500", "--buyers=1000", "--over=4s", "--double-clicks=0.1")
	c.Setenv("REDIS_URL", testkit.RedisURL(t))
	c.Setenv("DATABASE_URL", testkit.DatabaseURL(t))
	c.Setenv("TMPDIR", t.TempDir()) // for its logs
	return c
}

func TestDemoPasses(t *testing.T) {
	t.Parallel()
	c := demoCommand(t)
	c.Start()
	state := c.Wait(within)
	assert.Equal(t, exitOK, state.ExitCode())
	out := c.Output()
	assert.Regexp(t, "kill -9 of worker-[12] with", out)
	for _, name := range []string{"S1", "S2", "S3", "S4", "S5"} {
		assert.Contains(t, out, "✓ "+name)
	}
	assert.NotContains(t, out, "level=", "the story contains no log")
}

// A Postgres that loses one row of a batch breaks a promise.
func TestDemoFailsOnLostOrder(t *testing.T) {
	t.Parallel()
	_, err := testkit.Pool(t).Exec(t.Context(), `
		CREATE FUNCTION lose() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
		CREATE TRIGGER lose BEFORE INSERT ON orders FOR EACH ROW WHEN (NEW.sequence = 10) EXECUTE FUNCTION lose();`)
	require.NoError(t, err)
	c := demoCommand(t)
	c.Start()
	state := c.Wait(2 * within)
	assert.Equal(t, exitFailed, state.ExitCode())
	assert.Contains(t, c.Output(), "✗ S5")
	assert.Contains(t, c.Output(), "the logs of all processes are in")
}
