package reservation_test

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
)

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
