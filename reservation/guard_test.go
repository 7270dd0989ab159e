package reservation_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/reservation/catalog"
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

// replicaPair is a Redis with a replica, and an address that leads to one of them, like a host name.
type replicaPair struct {
	t        *testing.T
	first    *localserver.Redis
	second   *localserver.Redis
	address  atomic.Value // string
	atFirst  *redis.Client
	atSecond *redis.Client
}

func newReplicaPair(t *testing.T) *replicaPair {
	t.Helper()
	h := &replicaPair{t: t, first: testkit.OwnRedis(t), second: testkit.OwnRedis(t)}
	h.atFirst, h.atSecond = testkit.Client(t, h.first.URL), testkit.Client(t, h.second.URL)
	h.follow(h.atSecond, h.atFirst)
	h.address.Store(h.atFirst.Options().Addr)
	return h
}

// client connects to the server that has the address when it dials.
func (h *replicaPair) client() *redis.Client {
	h.t.Helper()
	rdb := redis.NewClient(&redis.Options{
		ContextTimeoutEnabled: true, DialerRetries: 1, Protocol: 2,
		Dialer: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, h.address.Load().(string))
		},
	})
	h.t.Cleanup(func() { _ = rdb.Close() })
	return rdb
}

// move points the address to another server, and ends the connections to the previous one.
func (h *replicaPair) move(from, to *redis.Client) {
	h.t.Helper()
	h.address.Store(to.Options().Addr)
	require.NoError(h.t, from.Do(h.t.Context(), "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes").Err())
}

// follow makes one server a replica of another, and waits until it has caught up.
func (h *replicaPair) follow(replica, primary *redis.Client) {
	h.t.Helper()
	ctx := h.t.Context()
	host, port, err := net.SplitHostPort(primary.Options().Addr)
	require.NoError(h.t, err)
	require.NoError(h.t, primary.ConfigSet(ctx, "repl-diskless-sync-delay", "0").Err())
	require.NoError(h.t, replica.Do(ctx, "REPLICAOF", host, port).Err())
	h.catchUp(replica, primary)
}

// catchUp waits until a replica has all current data of its primary.
func (h *replicaPair) catchUp(replica, primary *redis.Client) {
	h.t.Helper()
	require.NoError(h.t, primary.Set(h.t.Context(), "mark", uuid.NewString(), 0).Err())
	testkit.Eventually(h.t, 20*time.Second, "the replica has caught up", func() bool {
		mark, err := replica.Get(h.t.Context(), "mark").Result()
		return err == nil && mark == primary.Get(h.t.Context(), "mark").Val()
	})
}

// cut ends the replication of the second server, which cannot log in at the first any more.
func (h *replicaPair) cut() {
	h.t.Helper()
	ctx := h.t.Context()
	require.NoError(h.t, h.atSecond.ConfigSet(ctx, "masteruser", "nobody").Err())
	require.NoError(h.t, h.atSecond.ConfigSet(ctx, "masterauth", "wrong").Err())
	require.NoError(h.t, h.atFirst.Do(ctx, "CLIENT", "KILL", "TYPE", "replica").Err())
}

func (h *replicaPair) promote(replica *redis.Client) {
	h.t.Helper()
	require.NoError(h.t, replica.Do(h.t.Context(), "REPLICAOF", "NO", "ONE").Err())
}

// appended returns the server's statistics of XADD since its start or their reset, or "nothing".
func appended(t *testing.T, rdb *redis.Client) string {
	t.Helper()
	stats, err := rdb.InfoMap(t.Context(), "commandstats").Result()
	require.NoError(t, err)
	for _, section := range stats {
		if line := section["cmdstat_xadd"]; line != "" {
			return line
		}
	}
	return "nothing"
}

func resetStats(t *testing.T, rdb *redis.Client) {
	t.Helper()
	require.NoError(t, rdb.ConfigResetStat(t.Context()).Err())
}

// refuses fails the test unless the store is unavailable to the user.
func refuses(t testing.TB, s *testshop.Shop, sale uuid.UUID, user string) {
	t.Helper()
	a, err := s.Reserve(t.Context(), reservation.Request{Sale: sale, User: user, Quantity: 1})
	require.ErrorIs(t, err, reservation.ErrUnavailable, "%s got %v", user, a)
	require.NotErrorIs(t, err, reservation.ErrOutcomeUnknown)
}

// crowd buys without a pause until stop, which waits until its buyers were refused 20 times each on average.
func crowd(t testing.TB, s *testshop.Shop, sale uuid.UUID) (stop func()) {
	t.Helper()
	const buyers = 8
	ctx, cancel := context.WithCancel(t.Context())
	var refused atomic.Int64
	done := make(chan struct{}, buyers)
	for buyer := range buyers {
		go func() {
			defer func() { done <- struct{}{} }()
			for n := 0; ctx.Err() == nil; n++ {
				a, err := s.Reserve(
					t.Context(), reservation.Request{Sale: sale, User: fmt.Sprintf("crowd-%d-%d", buyer, n), Quantity: 1},
				)
				if err != nil {
					refused.Add(1)
				} else if a.Verdict != reservation.Reserved {
					t.Errorf("a buyer got %s", a.Verdict)
				}
			}
		}()
	}
	return func() {
		t.Helper()
		before := refused.Load()
		testkit.Eventually(
			t, 20*time.Second, "the crowd is refused", func() bool { return refused.Load() > before+20*buyers },
		)
		cancel()
		for range buyers {
			<-done
		}
	}
}

// rebuild rebuilds a sale as a worker does, but without Postgres.
func rebuild(t testing.TB, s *testshop.Shop, sale reservation.Sale, epoch int64, holders ...reservation.Holder) {
	t.Helper()
	ctx, p := t.Context(), sale.Layout().Partition(0)
	closed, err := s.CloseSale(ctx, sale.ID, p, testshop.Token, 0)
	require.NoError(t, err)
	require.NoError(t, s.StageBuyers(ctx, p, sale.ID, testshop.Token, epoch, holders))
	var held int64
	for _, h := range holders {
		held += h.Reservation.Quantity
	}
	sale.Epoch = epoch
	sale.Revision++
	require.NoError(
		t, s.OpenRebuilt(
			ctx, reservation.Rebuilt{
				Sale: sale, Left: sale.Stock - held, Held: held, LastPlace: closed.Sequence, Holders: int64(len(holders)),
				Token: testshop.Token,
			},
		),
	)
}

// The script of one partition does not admit calls for the other.
func TestPartitionsAreVerifiedIndependently(t *testing.T) {
	t.Parallel()
	keys := testkit.Keys(t)
	keys.Partitions = 2
	s := testshop.NewShopOn(t, testshop.Options{Keys: keys})
	var sales [2]catalog.CountedSale
	for sales[0].ID == uuid.Nil || sales[1].ID == uuid.Nil {
		sale := s.Sale(t, 10)
		sales[sale.Layout().Partition(0)] = sale
	}
	for _, sale := range sales {
		s.Buy(t, sale.ID, "ann")
	}
	require.NoError(t, s.Distrust(t.Context(), 1))
	fresh := s.Next(t, s.Rdb)
	for range 3 { // with the script of partition 0 loaded
		for n, ingress := range []*testshop.Shop{s, fresh} {
			require.Equal(t, reservation.Reserved, ingress.Ask(t, sales[0].ID, uuid.NewString()).Verdict, n)
			refuses(t, ingress, sales[1].ID, "eve")
		}
	}
	testkit.VerifyServer(t, s.Pool, s.Store, 1)
	fresh.Buy(t, sales[1].ID, "bob")
	s.Buy(t, sales[1].ID, "cid")
}
