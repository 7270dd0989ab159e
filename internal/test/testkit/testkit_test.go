package testkit_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/sql"
	"stampede/sql/migrate"
)

func TestMain(m *testing.M) { testkit.Main(m, testkit.WithCommand(command)) }

// command runs in the re-executed test binary.
func command() int {
	switch os.Args[1] {
	case "print":
		fmt.Println("arguments", os.Args[2:])
		fmt.Println("prefix", os.Getenv("STAMPEDE_KEY_PREFIX"), "redis", os.Getenv("REDIS_URL"), "database",
			os.Getenv("DATABASE_URL"))
		return 3
	case "wait":
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		fmt.Println("waiting")
		<-ctx.Done()
		return 0
	case "echo":
		for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
			fmt.Println("read", lines.Text())
		}
		return 0
	}
	return 2
}

func TestEachTestHasOwnMigratedDatabase(t *testing.T) {
	seen := make(chan string, 2)
	t.Run("tests", func(t *testing.T) {
		for range 2 {
			t.Run("", func(t *testing.T) {
				t.Parallel()
				pool := testkit.Pool(t)
				require.NoError(t, sql.Check(t.Context(), pool))
				_, err := pool.Exec(t.Context(),
					"INSERT INTO sales (id, name, stock) VALUES ('00000000-0000-0000-0000-000000000001', 'one', 1)")
				require.NoError(t, err, "the row of another test must not be visible")

				var current string
				require.NoError(t, pool.QueryRow(t.Context(), "SELECT current_database()").Scan(&current))
				require.Contains(t, testkit.DatabaseURL(t), current, "URL and pool name different databases")
				seen <- current
			})
		}
	})
	pool := testkit.Pool(t)
	for range 2 {
		var left bool
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)",
			<-seen).Scan(&left))
		require.False(t, left, "the database must be dropped")
	}
}

func TestKeysAreDeletedWithTheirTest(t *testing.T) {
	client := testkit.Redis(t)
	other := testkit.Keys(t)
	require.NoError(t, client.Set(t.Context(), other.Orders(0), "other", 0).Err())
	var mine string
	t.Run("test", func(t *testing.T) {
		mine = testkit.Keys(t).Orders(0)
		require.NotEqual(t, mine, other.Orders(0))
		require.NoError(t, client.Set(t.Context(), mine, "mine", 0).Err())
	})
	require.Zero(t, client.Exists(t.Context(), mine).Val())
	require.EqualValues(t, 1, client.Exists(t.Context(), other.Orders(0)).Val(), "keys of other tests must remain")
}

func TestOwnServersAreNotShared(t *testing.T) {
	t.Parallel()
	require.NotEqual(t, testkit.RedisURL(t), testkit.OwnRedis(t).URL)

	own := testkit.OwnPostgres(t)
	states, err := migrate.Status(t.Context(), own.URL)
	require.NoError(t, err)
	for _, m := range states {
		require.True(t, m.Applied, m.Name)
	}
}

func TestCommandRunsTestBinary(t *testing.T) {
	t.Parallel()
	keys := testkit.Keys(t)
	cmd := testkit.Command(t, "print", "a", "b")
	cmd.UseServers(keys)
	cmd.Start()
	require.Equal(t, 3, cmd.Wait(10*time.Second).ExitCode())
	require.Contains(t, cmd.Output(), "arguments [a b]")
	require.Equal(t, "prefix "+keys.Prefix+" redis "+testkit.RedisURL(t)+" database "+testkit.DatabaseURL(t),
		cmd.WaitOutput(time.Second, "prefix"))
}

func TestCommandIsStoppedAndKilled(t *testing.T) {
	t.Parallel()
	stopped := testkit.Command(t, "wait")
	stopped.Start()
	stopped.WaitOutput(10*time.Second, "waiting")
	require.Equal(t, 0, stopped.Stop().ExitCode())

	killed := testkit.Command(t, "wait")
	killed.Start()
	killed.WaitOutput(10*time.Second, "waiting")
	killed.Kill()
	killed.WaitKilled(time.Second)
}

func TestEventuallyNamesCondition(t *testing.T) {
	probe := &fatal{TB: t}
	calls := 0
	testkit.Eventually(probe, time.Second, "three calls", func() bool { calls++; return calls == 3 })
	require.Empty(t, probe.message)

	testkit.Eventually(probe, time.Millisecond, "a condition", func() bool { return probe.message != "" })
	require.Contains(t, probe.message, "a condition")
}

// fatal records the message of Fatalf.
type fatal struct {
	testing.TB
	message string
}

func (f *fatal) Fatalf(format string, args ...any) { f.message = fmt.Sprintf(format, args...) }

func TestLoggerIsSilentAfterTheTest(t *testing.T) {
	probe := &logged{TB: t}
	logger := testkit.Logger(probe)
	logger.Debug("during", "n", 1)
	require.Len(t, probe.lines, 1)
	require.Contains(t, probe.lines[0], "msg=during n=1")
	require.False(t, strings.HasSuffix(probe.lines[0], "\n"))

	probe.cleanup()
	logger.Error("after")
	require.Len(t, probe.lines, 1)
}

// logged records log lines and the cleanup.
type logged struct {
	testing.TB
	lines   []string
	cleanup func()
}

func (l *logged) Log(args ...any)   { l.lines = append(l.lines, fmt.Sprint(args...)) }
func (l *logged) Cleanup(do func()) { l.cleanup = do }
