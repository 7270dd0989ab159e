// Package redisinfo reads how the servers of Redis are: their memory and their append-only file.
package redisinfo

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"
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
}

// Up is true if the server answers: it may also load its data, or refuse INFO.
func (s Server) Up() bool {
	answered := redis.Error(nil)
	return s.Err == nil || errors.As(s.Err, &answered)
}

// Masters asks the server, the master behind Sentinels, or each master of a cluster, sorted by name.
func Masters(ctx context.Context, rdb redis.UniversalClient) (servers []Server) {
	var mu sync.Mutex
	read := func(ctx context.Context, client *redis.Client) error {
		text, err := client.Info(ctx, "memory", "persistence").Result()
		s := parse(text)
		s.Name, s.Err = client.Options().Addr, err
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

func parse(info string) (s Server) {
	for line := range strings.Lines(info) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		number, _ := strconv.ParseInt(value, 10, 64) // 0 for a text
		switch name {
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
