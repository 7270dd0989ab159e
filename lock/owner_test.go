package lock

import (
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
)

// Redis Cluster hashes what is between the first { and the } after it, if that is not empty, and
// else the whole key.
func TestTheLockersOwnKeysLieInTheSlotOfTheLocks(t *testing.T) {
	cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}})
	t.Cleanup(func() { _ = cluster.Close() })
	l := New(cluster)
	for key, want := range map[string]string{
		"stampede:{0}:lock:ann": "lock:fence:{0}",
		"ann":                   "lock:fence:{ann}",
		"a{b}{c}":               "lock:fence:{b}",
	} {
		assert.Equal(t, want, l.inSlotOf(key, l.fence))
	}
	for _, key := range []string{"{}ann", "a}b", "{ann"} {
		_, err := l.TryAcquire(t.Context(), key)
		assert.ErrorIs(t, err, ErrInvalid, "no other name can be put into the slot of %s", key)
	}

	alone := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	t.Cleanup(func() { _ = alone.Close() })
	mine := New(alone, WithPrefix("mine"))
	assert.Equal(t, "mine:fence", mine.inSlotOf("stampede:{0}:lock:ann", mine.fence))
}

func TestAChannelIsNamedAsRedissonDoes(t *testing.T) {
	for key, want := range map[string]string{
		"ann":                   "redisson_lock__channel:{ann}",
		"stampede:{0}:lock:ann": "redisson_lock__channel:stampede:{0}:lock:ann",
		"{ann":                  "redisson_lock__channel:{ann",
	} {
		assert.Equal(t, want, channelOf(key))
	}
}

func TestAnAnswerThatTheHeaderDoesNotListIsAnError(t *testing.T) {
	of := func(answers ...any) *redis.Cmd {
		cmd := redis.NewCmd(t.Context())
		cmd.SetVal(answers)
		return cmd
	}
	is, err := said(answerReleased, 2, of("released", "lost"))
	assert.NoError(t, err)
	assert.Equal(t, []bool{true, false}, is)
	_, err = said(answerReleased, 2, of("released"))
	assert.ErrorContains(t, err, "1 answers for 2 keys")
	_, err = said(answerReleased, 1, of("renewed"))
	assert.ErrorContains(t, err, `unknown answer "renewed"`)
}
