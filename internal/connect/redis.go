package connect

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// ErrRedisURL is returned for a URL that cannot be read. It says no more, because the URL holds a
// password and any part of a broken one may be a piece of it.
var ErrRedisURL = errors.New("REDIS_URL must look like redis://user:password@host:6379/0 (rediss:// for TLS, " +
	"unix:///path for a socket), special characters percent-encoded")

// Ingress: a buyer waits for each answer, so everything is short and an overload is said at once.
const (
	ingressDial  = 500 * time.Millisecond
	ingressRead  = time.Second
	ingressQueue = time.Second // for a free connection
	// ingressRetries is safe because the scripts recognise their own repeat. Three tries last up to
	// 3 s, within what a buyer waits.
	ingressRetries = 2
	// ingressConnections: requests of a sale share one call, so each is a sale that is sold at this moment.
	ingressConnections = 64
)

// Control: acks, locks and operators, which may rather wait than fail.
const (
	controlDial        = 2 * time.Second
	controlRead        = 3 * time.Second
	controlQueue       = 5 * time.Second
	controlRetries     = 3
	controlConnections = 16
)

// MaxBlock bounds the BLOCK of a read on a Blocking client: with the time-out below, it is what it
// takes to notice that Redis is gone without a word.
const MaxBlock = 5 * time.Second

const (
	blockingDial = 2 * time.Second
	blockingRead = MaxBlock + 3*time.Second
	// blockingConnections: one for each stream that a process reads, so as many as there can be
	// partitions. It is a bound: a worker of one partition opens one.
	blockingConnections = 64
)

// none switches off in go-redis what 0 would set to its default.
const none = -1

// Ingress returns a client for the purchase path.
func Ingress(redisURL string) (*redis.Client, error) {
	return open(redisURL, "stampede-ingress", func(o *redis.Options) {
		o.DialTimeout, o.ReadTimeout, o.WriteTimeout = ingressDial, ingressRead, ingressRead
		o.PoolTimeout, o.PoolSize, o.MaxRetries = ingressQueue, ingressConnections, ingressRetries
	})
}

// Control returns a client for acks, locks and the work of operators.
func Control(redisURL string) (*redis.Client, error) {
	return open(redisURL, "stampede-control", func(o *redis.Options) {
		o.DialTimeout, o.ReadTimeout, o.WriteTimeout = controlDial, controlRead, controlRead
		o.PoolTimeout, o.PoolSize, o.MaxRetries = controlQueue, controlConnections, controlRetries
	})
}

// Blocking returns a client for XREADGROUP BLOCK of at most MaxBlock. It never retries by itself: a
// read whose answer was lost has put its entries on the consumer's pending list, and the reader
// must learn of it to look there.
func Blocking(redisURL string) (*redis.Client, error) {
	return open(redisURL, "stampede-blocking", func(o *redis.Options) {
		o.DialTimeout, o.ReadTimeout, o.WriteTimeout = blockingDial, blockingRead, controlRead
		o.PoolTimeout, o.PoolSize, o.MaxRetries = controlQueue, blockingConnections, none
	})
}

// open sets what all clients have in common. A client connects when it is first used.
func open(redisURL, name string, set func(*redis.Options)) (*redis.Client, error) {
	routeLog()
	parsed, err := url.Parse(redisURL)
	if err != nil || !slices.Contains([]string{"redis", "rediss", "unix"}, parsed.Scheme) {
		return nil, ErrRedisURL
	}
	o, err := redis.ParseURL(redisURL)
	if err != nil {
		return nil, ErrRedisURL
	}
	o.ClientName = name
	// A call ends when its context says so, not when the socket does.
	o.ContextTimeoutEnabled = true
	// The tries of a command are enough: go-redis would dial five times within each of them.
	o.DialerRetries = 1
	// All connections come out of the pool whose size is set here; pipelines would have ten more.
	o.PipelinePoolSize = none
	// RESP2 says all that the scripts answer, and saves a look for push messages before every
	// answer. CLIENT SETINFO and CLIENT MAINT_NOTIFICATIONS are errors in Redis 7.0.
	o.Protocol = 2
	o.DisableIdentity = true
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	set(o)
	return redis.NewClient(o), nil
}

// routeLog sends go-redis's own log to slog, once: its callers get the same troubles as errors.
var routeLog = sync.OnceFunc(func() { redis.SetLogger(logger{}) })

type logger struct{}

// Printf implements go-redis's logger.
func (logger) Printf(ctx context.Context, format string, v ...any) {
	if l := slog.Default(); l.Enabled(ctx, slog.LevelDebug) {
		l.DebugContext(ctx, "go-redis: "+fmt.Sprintf(format, v...))
	}
}
