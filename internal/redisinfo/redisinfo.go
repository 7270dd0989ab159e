// Package redisinfo reads how the servers of Redis are, such as their memory and their append-only file.
package redisinfo

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"stampede/internal/clocks"
)

// Server is what INFO of a server says.
type Server struct {
	// Name is its address, or the name of the master at its Sentinels.
	Name string
	// Err is why nothing is known of it, nil if it answered.
	Err error

	// UsedBytes is its memory in use, MaxBytes its maxmemory; 0: unlimited.
	UsedBytes, MaxBytes int64
	// LogOn is true if it has an append-only file, LogFails if the last write to that failed.
	LogOn, LogFails bool
	// DelayedSyncs of the append-only file since its start, with appendfsync everysec.
	DelayedSyncs int64

	// Ping is the round trip of a PING.
	Ping time.Duration
	// Clock is its clock, nil if it does not tell.
	Clock *clocks.Reading
	// Numbers are all that it tells, by their names in INFO. Which ones depends on its version and its provider.
	Numbers map[string]float64
}

// Up is true if the server answers: it may also load its data, or refuse INFO.
func (s Server) Up() bool {
	answered := redis.Error(nil)
	return s.Err == nil || errors.As(s.Err, &answered)
}

// Sum returns the sum of numbers of INFO, and false if it does not tell one of them.
func (s Server) Sum(names ...string) (sum float64, told bool) {
	for _, name := range names {
		number, told := s.Numbers[name]
		if !told {
			return 0, false
		}
		sum += number
	}
	return sum, true
}

// Masters asks the server, the master behind Sentinels, or each master of a cluster, sorted by name.
func Masters(ctx context.Context, rdb redis.UniversalClient) (servers []Server) {
	var mu sync.Mutex
	read := func(ctx context.Context, client *redis.Client) error {
		began := time.Now()
		err := client.Ping(ctx).Err()
		ping, s := time.Since(began), parse("")
		if err == nil {
			var clock clocks.Reading
			clock, err = clocks.Read(func() (time.Time, error) {
				text, err := client.Info(ctx, "server", "memory", "persistence", "clients", "stats", "cpu").Result()
				s = parse(text)
				return time.UnixMicro(int64(s.Numbers[timeNumber])), err
			})
			if _, told := s.Numbers[timeNumber]; told {
				s.Clock = &clock
			}
		}
		s.Name, s.Err, s.Ping = client.Options().Addr, err, ping
		mu.Lock()
		defer mu.Unlock()
		servers = append(servers, s)
		return nil
	}
	switch client := rdb.(type) {
	case *redis.Client:
		_ = read(ctx, client) // it is nil
	case *redis.ClusterClient:
		_ = client.ForEachMaster(ctx, read) // without any answer there are no masters to tell of
	}
	slices.SortFunc(servers, func(a, b Server) int { return strings.Compare(a.Name, b.Name) })
	// The addresses of a cluster in trouble may name a master twice.
	return slices.CompactFunc(servers, func(a, b Server) bool { return a.Name == b.Name })
}

// timeNumber is the name of the time in INFO, in microseconds since 1970.
const timeNumber = "server_time_usec"

func parse(info string) Server {
	s := Server{Numbers: map[string]float64{}}
	for line := range strings.Lines(info) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		exact, err := strconv.ParseFloat(value, 64)
		if err == nil {
			s.Numbers[name] = exact
		}
		switch number := int64(exact); name { // 0 for a text
		case "used_memory":
			s.UsedBytes = number
		case "maxmemory":
			s.MaxBytes = number
		case "aof_enabled":
			s.LogOn = number == 1
		case "aof_last_write_status":
			s.LogFails = value != "ok"
		case "aof_delayed_fsync":
			s.DelayedSyncs = number
		}
	}
	return s
}
