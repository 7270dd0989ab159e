package reservation_test

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
)

// guarded runs a guard of the shop's store until the test ends.
func guarded(t testing.TB, s *testshop.Shop) *testshop.Shop {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	guard := reservation.Guard{Store: s.Store, Pool: s.Pool, Logger: testkit.Logger(t)}
	go func() { ended <- guard.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("guard: %v", err)
		}
	})
	return s
}

// awaitRefusal waits until the store refuses the sale.
func awaitRefusal(t testing.TB, s *testshop.Shop, sale uuid.UUID) {
	t.Helper()
	testkit.Eventually(t, 30*time.Second, "the guard refuses", func() bool {
		_, err := s.Reserve(t.Context(), reservation.Request{Sale: sale, User: uuid.NewString(), Quantity: 1})
		if err != nil {
			require.ErrorIs(t, err, reservation.ErrUnavailable)
		}
		return err != nil
	})
}

// The ingress has sold in the new epoch, and then reaches the old primary.
func TestIngressRefusesOlderEpoch(t *testing.T) {
	t.Parallel()
	h := newReplicaPair(t)
	s := testshop.NewShopOn(t, testshop.Options{Redis: h.client()})
	sale := s.Sale(t, 100)
	s.Buy(t, sale.ID, "ann")
	h.catchUp(h.atSecond, h.atFirst)
	h.promote(h.atSecond)
	h.move(h.atFirst, h.atSecond)
	rebuild(t, s, sale.Sale, 2)
	testkit.VerifyServer(t, s.Pool, s.Store, 0)
	require.EqualValues(t, 2, s.Ask(t, sale.ID, "bob").Reservation.Epoch)

	resetStats(t, h.atFirst)
	h.move(h.atSecond, h.atFirst)
	refuses(t, s, sale.ID, "eve")
	refuses(t, s, sale.ID, "bob")
	require.Equal(t, "nothing", appended(t, h.atFirst))
	h.move(h.atFirst, h.atSecond)
	require.Equal(t, reservation.AlreadyPurchased, s.Ask(t, sale.ID, "bob").Verdict)
}

func TestGuardResumesServerNamedByPostgres(t *testing.T) {
	t.Parallel()
	s := guarded(t, testshop.NewShop(t))
	sale := s.Sale(t, 100).ID
	s.Buy(t, sale, "ann")
	state, err := s.Inspect(t.Context(), 0)
	require.NoError(t, err)
	name := func(runID string) {
		require.NoError(t, s.Exec(t, "UPDATE redis_servers SET run_id = $1", runID))
	}
	name("another")
	awaitRefusal(t, s, sale)
	name(state.RunID)
	testkit.Eventually(t, 30*time.Second, "the sale resumes", func() bool {
		_, err := s.Reserve(t.Context(), reservation.Request{Sale: sale, User: "bob", Quantity: 1})
		return err == nil
	})
}

// records is a slog.Handler that passes on all records of level Info and above.
type records chan slog.Record

func (r records) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelInfo }

func (r records) WithAttrs([]slog.Attr) slog.Handler { return r }

func (r records) WithGroup(string) slog.Handler { return r }

func (r records) Handle(_ context.Context, record slog.Record) error {
	r <- record
	return nil
}

func (r records) next(t *testing.T) slog.Record {
	t.Helper()
	select {
	case record := <-r:
		return record
	case <-time.After(30 * time.Second):
		t.Fatal("nothing was logged")
		return slog.Record{}
	}
}

// The server recorded in Postgres may have units left.
func TestGuardRefusalIsNotSoldOut(t *testing.T) {
	t.Parallel()
	s, sale := testshop.SoldOutShop(t)
	guarded(t, s)
	require.NoError(t, s.Exec(t, "UPDATE redis_servers SET run_id = 'another'"))
	awaitRefusal(t, s, sale)
	refuses(t, s, sale, "loser")
}

// Without Postgres the guard cannot compare the servers, and refuses nothing.
func TestGuardKeepsSellingWithoutPostgres(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Sale(t, 1000).ID
	s.Buy(t, sale, "ann")
	require.NoError(t, s.Exec(t, "ALTER TABLE redis_servers RENAME TO away"))
	require.NoError(t, s.Exec(t, "UPDATE away SET run_id = 'another'"))

	var warned sync.WaitGroup
	warned.Add(1)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	guard := reservation.Guard{Store: s.Store, Pool: s.Pool, Logger: onFirstWarning(warned.Done)}
	go func() { ended <- guard.Run(ctx) }()
	warned.Wait()
	s.Buy(t, sale, "bob")
	require.NoError(t, s.Exec(t, "ALTER TABLE away RENAME TO redis_servers"))
	awaitRefusal(t, s, sale)
	cancel()
	require.NoError(t, <-ended)
}

// onFirstWarning makes a logger that calls f at its first warning.
func onFirstWarning(f func()) *slog.Logger {
	once := sync.OnceFunc(f)
	return slog.New(slog.NewTextHandler(warningWriter(func(line string) {
		if strings.Contains(line, "level=WARN") {
			once()
		}
	}), nil))
}

type warningWriter func(line string)

func (w warningWriter) Write(line []byte) (int, error) {
	w(string(line))
	return len(line), nil
}

// limitedUser returns a client with the rights of the rules, and a function that changes them.
func limitedUser(t *testing.T, url string) (as *redis.Client, give func(rules ...any)) {
	t.Helper()
	operator := testkit.Client(t, url)
	give = func(rules ...any) {
		t.Helper()
		require.NoError(t, operator.Do(t.Context(),
			append([]any{"ACL", "SETUSER", "limited", "reset", "on", "nopass", "~*", "&*", "+@all"}, rules...)...).Err())
	}
	give()
	o := *operator.Options()
	o.Username, o.Password = "limited", "any"
	as = redis.NewClient(&o)
	t.Cleanup(func() { _ = as.Close() })
	return as, give
}

func TestMissingPermissionsAreReported(t *testing.T) {
	t.Parallel()
	as, give := limitedUser(t, testkit.OwnRedis(t).URL)
	missing := func() []string {
		t.Helper()
		names, err := reservation.OperatorRights.Missing(t.Context(), as, reservation.Keys{Prefix: "stampede"}, 0, false)
		require.NoError(t, err)
		return names
	}
	require.Empty(t, missing())
	for rule, name := range map[string]string{
		"-hset": "HSET", "-script|load": "SCRIPT LOAD",
		"-xgroup|create": "XGROUP CREATE", "-watch": "WATCH", "-subscribe": "SUBSCRIBE",
	} {
		give(rule)
		require.Equal(t, []string{name}, missing(), rule)
	}
	give("resetkeys", "~stampede:*")
	require.Empty(t, missing())
	give("resetkeys", "~other:*")
	require.Equal(t, []string{"EVALSHA of stampede:{0}:rights"}, missing())

	// The commands of all scripts are included.
	give("-@all", "+eval", "+evalsha")
	all := strings.Join(missing(), ",") + ","
	files, err := filepath.Glob("../lua/*.lua")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		source, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, m := range regexp.MustCompile(`(?:redis\.p?call|append)\('([A-Z]+)'`).FindAllStringSubmatch(string(source),
			-1) {
			require.Regexp(t, `\b`+m[1]+`\b`, all, file)
		}
	}
}

// Without a permission nothing is sold, and the log names it.
func TestGuardLogsMissingPermission(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	as, give := limitedUser(t, own.URL)
	s := testshop.NewShopOn(t, testshop.Options{Redis: as})
	sale := s.Sale(t, 10)
	s.Buy(t, sale.ID, "ann")
	log := make(records, 100)
	guard := reservation.Guard{Store: s.Store, Pool: s.Pool, Logger: slog.New(log)}
	ctx, stop := context.WithCancel(t.Context())
	stopped := make(chan error, 1)
	go func() { stopped <- guard.Run(ctx) }()

	give("-hset")
	named := log.next(t)
	require.Equal(t, slog.LevelError, named.Level)
	require.Contains(t, named.Message, "lacks permissions")
	found := ""
	named.Attrs(func(a slog.Attr) bool {
		if a.Key == "commands" {
			found = a.Value.String()
		}
		return true
	})
	require.Equal(t, "HSET", found)
	give()
	require.Equal(t, slog.LevelInfo, log.next(t).Level)
	s.Buy(t, sale.ID, "bob")
	stop()
	require.NoError(t, <-stopped)
}

// TestACLFilesMatchRights: the users in the files of deploy/acl have the commands of their roles, and few others.
func TestACLFilesMatchRights(t *testing.T) {
	t.Parallel()
	server := testkit.OwnRedis(t)
	for role, rights := range map[string]reservation.Rights{
		"ingress": reservation.IngressRights, "worker": reservation.WorkerRights, "operator": reservation.OperatorRights,
	} {
		file, err := os.ReadFile("../deploy/acl/" + role + ".acl")
		require.NoError(t, err)
		rules := strings.Fields(string(file))
		require.Equal(t, []string{"user", "stampede-" + role, "on", ">PASSWORD"}, rules[:4])
		as, give := limitedUser(t, server.URL)
		give() // resets the user, whom the next call restricts
		user := make([]any, 0, len(rules))
		for _, rule := range append([]string{"resetkeys", "resetchannels", "-@all"}, rules[4:]...) {
			user = append(user, rule)
		}
		give(user...)
		missing, err := rights.Missing(t.Context(), as, reservation.Keys{Prefix: "stampede"}, 0, true)
		require.NoError(t, err)
		require.Empty(t, missing, role)

		give("resetkeys", "resetchannels", "-@all", "~stampede:*", "+evalsha", "+eval")
		all, err := rights.Missing(t.Context(), as, reservation.Keys{Prefix: "stampede"}, 0, true)
		require.NoError(t, err)
		needed := map[string]bool{
			"EVAL": true, "EVALSHA": true, "SELECT": true, // for another database than 0
			"CONFIG GET": role == "operator", // for doctor, which does without
		}
		for _, name := range all {
			needed[name] = true
		}
		for _, rule := range rules {
			if command, grants := strings.CutPrefix(rule, "+"); grants {
				name := strings.ToUpper(strings.ReplaceAll(command, "|", " "))
				require.True(t, needed[name], "%s has %s, which it does not need", role, name)
			}
		}
	}
}
