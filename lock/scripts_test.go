package lock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
)

// WithListenIdle sets how long the connection for release messages stays open without a waiter.
func WithListenIdle(idle time.Duration) Option { return func(s *settings) { s.listenIdle = idle } }

// WithYield sets how long a lock released here is left to each other process that waits for it.
func WithYield(yield time.Duration) Option { return func(s *settings) { s.yield = yield } }

// Waiting is the number of waiters for a key in this process.
func (l *Locker) Waiting(key string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if q := l.waiters.queues[key]; q != nil {
		return len(q.waiters)
	}
	return 0
}

// Listeners is how many connections listened for the release of a key at the last attempt of a
// waiter here, or at the last release here.
func (l *Locker) Listeners(key string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if q := l.waiters.queues[key]; q != nil {
		return q.listeners
	}
	return 0
}

// MayListen reports whether Redis may still count this process as a listener for a key.
func (l *Locker) MayListen(key string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.waiters.channels[releaseChannel(key)] > 0
}

// Callbacks is how many contexts end with the lease.
func (le *Lease) Callbacks() int {
	le.locker.mu.Lock()
	defer le.locker.mu.Unlock()
	return len(le.callbacks)
}

// Running ends when the Locker is closed.
func (l *Locker) Running() context.Context { return l.running }

// Redis Cluster hashes the text between the first { and the next }, or the whole key if that is
// empty.
func TestOwnKeysAreInTheSlotOfTheLocks(t *testing.T) {
	cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}})
	t.Cleanup(func() { _ = cluster.Close() })
	l := New(cluster)
	for key, want := range map[string]string{
		"stampede:{0}:lock:ann": "lock:fence:{0}",
		"ann":                   "lock:fence:{ann}",
		"a{b}{c}":               "lock:fence:{b}",
	} {
		assert.Equal(t, want, l.scripts.inSlotWith(key, "lock:fence"))
	}
	for _, key := range []string{"{}ann", "a}b", "{ann"} {
		_, err := l.TryAcquire(t.Context(), key)
		assert.ErrorIs(t, err, ErrInvalid, "no other key can be in the slot of %s", key)
	}

	alone := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	t.Cleanup(func() { _ = alone.Close() })
	mine := New(alone, WithPrefix("mine"))
	assert.Equal(t, "mine:fence", mine.scripts.inSlotWith("stampede:{0}:lock:ann", "mine:fence"))
}

func TestChannelHasRedissonsName(t *testing.T) {
	for key, want := range map[string]string{
		"ann":                   "redisson_lock__channel:{ann}",
		"stampede:{0}:lock:ann": "redisson_lock__channel:stampede:{0}:lock:ann",
		"{ann":                  "redisson_lock__channel:{ann",
	} {
		assert.Equal(t, want, releaseChannel(key))
	}
}

func TestUnknownAnswerIsAnError(t *testing.T) {
	reply := func(answers ...any) *redis.Cmd {
		cmd := redis.NewCmd(t.Context())
		cmd.SetVal(answers)
		return cmd
	}
	accepted := func(_ int, answer string) bool { return answer == answerReleased }
	assert.NoError(t, parseAnswers(reply("released", "lost"), 2, accepted))
	assert.ErrorContains(t, parseAnswers(reply("released"), 2, accepted), "1 answers for 2 keys")
	assert.ErrorContains(t, parseAnswers(reply("renewed"), 1, accepted), `unknown answer "renewed"`)
}

// redisError is an error that Redis replied.
type redisError string

func (r redisError) Error() string { return string(r) }
func (redisError) RedisError()     {}

// An earlier attempt may have done what a later one is refused for, unless the call itself is the
// reason.
func TestRejectedOnlyForErrorsInTheCall(t *testing.T) {
	for _, err := range []error{
		redisError("WRONGTYPE Operation against a key holding the wrong kind of value"),
		redisError("ERR stale: this call was abandoned"),
		redisError("CROSSSLOT Keys in request don't hash to the same slot"),
		fmt.Errorf("wrapped: %w", redisError("NOPERM no rights")),
	} {
		assert.True(t, rejected(err), err)
	}
	for _, err := range []error{
		nil, io.EOF, errors.New("WRONGTYPE from elsewhere"), redis.Nil, redisError("ERR max number of clients reached"),
		redisError("LOADING Redis is loading the dataset in memory"),
		redisError("READONLY You can't write against a read only replica."),
	} {
		assert.False(t, rejected(err), err)
	}
}

func TestLostErrorStaysShort(t *testing.T) {
	assert.EqualError(t, &LostError{Keys: []string{"a", "b"}}, "lock lost: a, b")
	long := &LostError{Keys: []string{"a", "b", "c", "d", "e", "f", "g"}}
	assert.EqualError(t, long, "lock lost: a, b, c, d, e and 2 more")
}

func TestUnavailableErrors(t *testing.T) {
	for err, want := range map[error]bool{
		redisError("LOADING Redis is loading the dataset in memory"):        true,
		redisError("READONLY You can't write against a read only replica."): true,
		redisError("MASTERDOWN Link with MASTER is down"):                   true,
		redisError("CLUSTERDOWN The cluster is down"):                       true,
		redisError("ERR max number of clients reached"):                     true,
		redisError("NOREPLICAS Not enough good replicas to write."):         true,
		redisError("BUSY Redis is busy running a script."):                  true,
		io.EOF:                   true,
		context.DeadlineExceeded: true,
		redis.ErrPoolTimeout:     true,
		redisError("NOPERM this user has no permissions to run the 'evalsha' command"):  false,
		redisError("NOAUTH Authentication required."):                                   false,
		redisError("WRONGPASS invalid username-password pair or user is disabled."):     false,
		redisError("WRONGTYPE Operation against a key holding the wrong kind of value"): false,
		redisError("ERR unknown"): false,
		redis.ErrClosed:           false,
	} {
		assert.Equal(t, want, isUnavailable(err), err)
	}
}
