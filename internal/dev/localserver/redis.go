package localserver

import (
	"context"
	"maps"
	"slices"
	"strconv"
	"syscall"
)

// RedisOptions configures a private Redis.
type RedisOptions struct {
	// Settings add to or replace the defaults, as in redis.conf ("maxmemory": "50mb").
	Settings map[string]string
}

// Redis is a private Redis server that syncs every write before it answers, and does not evict. Its
// methods are safe for concurrent use.
type Redis struct {
	URL    string
	server *server
}

// StartRedis starts a private Redis and waits until it serves. The server outlives ctx.
func StartRedis(ctx context.Context, o RedisOptions) (*Redis, error) {
	binary, found := findRedis()
	if !found {
		return nil, notInstalled(redisPrograms)
	}
	s, err := newServer("Redis", binary, syscall.SIGTERM)
	if err != nil {
		return nil, err
	}
	s.args = func(port int) []string { return redisArgs(port, o.Settings) }
	if err := s.start(ctx, freePort); err != nil {
		return nil, err
	}
	r := &Redis{server: s}
	r.URL = "redis://" + r.Addr()
	return r, nil
}

// Addr is the host and the port of the server.
func (r *Redis) Addr() string { return loopback(r.server.port) }

func redisArgs(port int, override map[string]string) []string {
	settings := map[string]string{
		"port":             strconv.Itoa(port),
		"bind":             "127.0.0.1",
		"protected-mode":   "yes",
		"appendonly":       "yes",
		"appendfsync":      "always",
		"save":             "", // the append-only file has everything
		"maxmemory":        "1gb",
		"maxmemory-policy": "noeviction",
	}
	maps.Copy(settings, override)
	var args []string
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		args = append(args, "--"+name, settings[name])
	}
	return args
}

// Stop stops the server and removes its data.
func (r *Redis) Stop() { r.server.stop(syscall.SIGTERM) }

// Kill ends the server by SIGKILL and waits for its end. The data stays for Restart.
func (r *Redis) Kill() { r.server.interrupt(syscall.SIGKILL) }

// Freeze suspends the server by SIGSTOP: connections stay open and the kernel accepts new ones, but requests wait. A
// frozen server can be thawed, killed, stopped and restarted.
func (r *Redis) Freeze() { r.server.signal(syscall.SIGSTOP) }

// Thaw resumes a frozen server by SIGCONT.
func (r *Redis) Thaw() { r.server.signal(syscall.SIGCONT) }

// Restart starts the server on the same port and data. A running server is stopped cleanly first.
func (r *Redis) Restart(ctx context.Context) error { return r.server.restart(ctx) }

// Pid is the process id of the server, 0 while it is down.
func (r *Redis) Pid() int { return r.server.pid() }
