package locks

import (
	"context"
	"maps"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/bench/rig"
	"stampede/internal/dev/localserver"
)

// persistence is what a Redis writes to disk.
type persistence struct {
	name     string
	settings map[string]string
}

var (
	inMemory  = persistence{"persistence off", map[string]string{"appendonly": "no"}}
	aofAlways = persistence{"appendfsync always", nil} // the default of the private servers

	persistences = []persistence{inMemory, aofAlways}
)

// server is a Redis for the benchmarks.
type server struct {
	url string
	rdb redis.UniversalClient // for INFO; no candidate uses it
	// redisson is a Java process that starts on first use.
	redisson *javaProcess
}

// servers are shared by all benchmarks, which run one after another.
var servers = map[string]*server{}

func serverWith(b *testing.B, p persistence) *server {
	b.Helper()
	if s := servers[p.name]; s != nil {
		return s
	}
	private, err := localserver.StartRedis(context.Background(), localserver.RedisOptions{Settings: p.settings})
	require.NoError(b, err)
	rig.AtExit(private.Stop)
	rdb, err := openRedis(private.URL)
	require.NoError(b, err)
	s := &server{url: private.URL, rdb: rdb}
	rig.AtExit(func() { _ = s.rdb.Close() })
	if len(servers) == 0 {
		rig.MeasuredWith("Redis " + s.info(b, "server")["redis_version"])
	}
	servers[p.name] = s
	return s
}

// open opens a library on the server until the benchmark ends.
func (s *server) open(b *testing.B, l library) client {
	b.Helper()
	c, err := l.open(s.url)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, c.close()) })
	return c
}

var keySerial atomic.Uint64

// newKey returns a new key.
func newKey() string { return "lock:" + strconv.FormatUint(keySerial.Add(1), 10) }

// info is a section of Redis's INFO.
func (s *server) info(b *testing.B, section string) map[string]string {
	b.Helper()
	sections, err := s.rdb.InfoMap(context.Background(), section).Result()
	require.NoError(b, err)
	all := map[string]string{}
	for _, fields := range sections {
		maps.Copy(all, fields)
	}
	return all
}

// work is what Redis has done.
type work struct {
	commands int           // of clients and of their scripts
	cpu      time.Duration // of the server's process
}

func (w work) since(before work) work {
	return work{w.commands - before.commands, w.cpu - before.cpu}
}

// work reads Redis's counters. Commands that open a connection or read the counters do not count.
func (s *server) work(b *testing.B) work {
	b.Helper()
	var w work
	for name, value := range s.info(b, "commandstats") {
		command, _, _ := strings.Cut(strings.TrimPrefix(name, "cmdstat_"), "|")
		switch command {
		case "info", "hello", "client", "config", "ping", "command":
			continue
		}
		_, rest, _ := strings.Cut(value, "calls=")
		calls, _, _ := strings.Cut(rest, ",")
		n, err := strconv.Atoi(calls)
		require.NoError(b, err, "%s:%s", name, value)
		w.commands += n
	}
	cpu := s.info(b, "cpu")
	for _, name := range []string{"used_cpu_user", "used_cpu_sys"} {
		seconds, err := strconv.ParseFloat(cpu[name], 64)
		require.NoError(b, err)
		w.cpu += time.Duration(seconds * float64(time.Second))
	}
	return w
}
