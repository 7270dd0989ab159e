package connect

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// Ingress: buyers wait for the answers, so time-outs are short and an overload is reported quickly.
const (
	ingressDial  = 500 * time.Millisecond
	ingressRead  = time.Second
	ingressQueue = time.Second // for a free connection
	// ingressRetries is safe because the scripts are idempotent. Three tries take up to 3 s, which a
	// buyer waits.
	ingressRetries = 2
	// ingressConnections: requests of a sale share one call, so this is the number of concurrently active sales.
	ingressConnections = 64
)

// Control: acks, locks and operators, for which waiting is better than failing.
const (
	controlDial        = 2 * time.Second
	controlRead        = 3 * time.Second
	controlQueue       = 5 * time.Second
	controlRetries     = 3
	controlConnections = 16
)

// MaxBlock bounds the BLOCK of a read on a Blocking client. With the time-out below, it bounds how long it
// takes to detect a vanished Redis.
const MaxBlock = 5 * time.Second

const (
	blockingDial = 2 * time.Second
	blockingRead = MaxBlock + 3*time.Second
	// blockingConnections: one per stream that a process reads, so as many as there can be partitions.
	// It is a limit: a worker with one partition opens one.
	blockingConnections = 64
)

// none disables an option of go-redis; 0 would be its default.
const none = -1

// Ingress returns a client for the purchase path.
func Ingress(redisURL string) (redis.UniversalClient, error) {
	return open(redisURL, "stampede-ingress", func(o *redis.Options) {
		o.DialTimeout, o.ReadTimeout, o.WriteTimeout = ingressDial, ingressRead, ingressRead
		o.PoolTimeout, o.PoolSize, o.MaxRetries = ingressQueue, ingressConnections, ingressRetries
	})
}

// Control returns a client for acks, locks and the work of operators.
func Control(redisURL string) (redis.UniversalClient, error) {
	return open(redisURL, "stampede-control", func(o *redis.Options) {
		o.DialTimeout, o.ReadTimeout, o.WriteTimeout = controlDial, controlRead, controlRead
		o.PoolTimeout, o.PoolSize, o.MaxRetries = controlQueue, controlConnections, controlRetries
	})
}

// Blocking returns a client for XREADGROUP BLOCK of at most MaxBlock. It never retries: the entries of a lost
// answer are on the consumer's pending list, and the reader needs the error to read them from there. With a cluster
// it follows redirections only, because the reader's commands forbid other retries.
func Blocking(redisURL string) (redis.UniversalClient, error) {
	return open(redisURL, "stampede-blocking", func(o *redis.Options) {
		o.DialTimeout, o.ReadTimeout, o.WriteTimeout = blockingDial, blockingRead, controlRead
		o.PoolTimeout, o.PoolSize, o.MaxRetries = controlQueue, blockingConnections, none
	})
}

// open returns a client for the server, the cluster or the master behind Sentinels that the URL names. It connects on
// first use.
func open(redisURL, name string, set func(*redis.Options)) (redis.UniversalClient, error) {
	routeLog()
	target, err := parseRedisURL(redisURL)
	if err != nil {
		return nil, err
	}
	o := target.single
	if o == nil {
		o = &redis.Options{DB: target.database}
		o.Username, o.Password = target.credentials()
	}
	o.ClientName = name
	// A call ends with its context.
	o.ContextTimeoutEnabled = true
	// The retries of commands are enough: by default go-redis dials five times in each of them.
	o.DialerRetries = 1
	// All connections belong to the pool whose size is set; pipelines would have ten more.
	o.PipelinePoolSize = none
	// RESP2 is enough for the answers of the scripts, and needs no check for push messages before each
	// answer. CLIENT SETINFO and CLIENT MAINT_NOTIFICATIONS are errors in Redis 7.0.
	o.Protocol = 2
	o.DisableIdentity = true
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	set(o)
	switch {
	case target.single != nil:
		return redis.NewClient(o), nil
	case target.masterName != "":
		return openSentinels(target, o), nil
	}
	return openCluster(target, o), nil
}

func openSentinels(target redisTarget, o *redis.Options) redis.UniversalClient {
	options := universal(target, o).Failover()
	options.MasterName = target.masterName
	options.SentinelUsername, options.SentinelPassword = target.sentinelUsername, target.sentinelPassword
	client := redis.NewFailoverClient(options)
	// It dials the address that the Sentinels tell. The name is for metrics and messages, which would call every master
	// FailoverClient.
	client.Options().Addr = target.masterName
	return client
}

// universal returns the options that are the same for Sentinel and for a cluster.
func universal(target redisTarget, o *redis.Options) *redis.UniversalOptions {
	u := &redis.UniversalOptions{
		Addrs: target.addrs, DB: o.DB, Username: o.Username, Password: o.Password, ClientName: o.ClientName,
		DialTimeout: o.DialTimeout, ReadTimeout: o.ReadTimeout, WriteTimeout: o.WriteTimeout,
		PoolTimeout: o.PoolTimeout, PoolSize: o.PoolSize, MaxRetries: o.MaxRetries,
		ContextTimeoutEnabled: o.ContextTimeoutEnabled, DialerRetries: o.DialerRetries,
		PipelinePoolSize: o.PipelinePoolSize, Protocol: o.Protocol, DisableIdentity: o.DisableIdentity,
		MaintNotificationsConfig: o.MaintNotificationsConfig,
	}
	if target.tls {
		u.Dialer = tlsDialer(target.addrs, o.DialTimeout)
	}
	return u
}

// routeLog sends the log of go-redis to slog, at level debug: callers get the same failures as errors.
var routeLog = sync.OnceFunc(func() { redis.SetLogger(debugLogger{}) })

type debugLogger struct{}

// Printf implements go-redis's logger.
func (debugLogger) Printf(ctx context.Context, format string, v ...any) {
	if l := slog.Default(); l.Enabled(ctx, slog.LevelDebug) {
		l.DebugContext(ctx, "go-redis: "+fmt.Sprintf(format, v...))
	}
}
