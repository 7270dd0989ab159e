package demo

import (
	"os/exec"
	"syscall"
	"testing"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/child"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/stream"
)

// The worker is a process that only sleeps; the test reads the stream for it.
func TestWorkerIsFrozenWithOrders(t *testing.T) {
	t.Parallel()
	d := &demo{redis: testkit.Redis(t), keys: testkit.Keys(t), sale: uuid.New()}
	started, err := child.Start(exec.Command("sleep", "infinity"), syscall.SIGKILL)
	require.NoError(t, err)
	defer func() { started.Stop(syscall.SIGKILL, stopWithin) }()
	worker := &process{Process: started, name: "worker"}
	over := false
	freeze := func() (bool, error) {
		return d.freezeWithOrders(t.Context(), worker, func() bool { return over })
	}
	require.NoError(t, d.redis.XGroupCreateMkStream(t.Context(), d.stream(), reservation.Group, "0").Err())
	add := func() {
		require.NoError(t, d.redis.XAdd(t.Context(), &redis.XAddArgs{
			Stream: d.stream(), Values: []any{stream.FieldPayload, "an order"},
		}).Err())
	}

	add()
	found, err := freeze()
	require.NoError(t, err)
	assert.False(t, found, "the entry is unread")
	testkit.Eventually(t, patience, "the worker goes on", func() bool { return !testkit.Stopped(t, started.Pid()) })

	read := func() error {
		return d.redis.XReadGroup(t.Context(), &redis.XReadGroupArgs{
			Group: reservation.Group, Consumer: "worker", Streams: []string{d.stream(), ">"}, Block: -1,
		}).Err()
	}
	require.NoError(t, read())
	found, err = freeze()
	require.NoError(t, err)
	assert.True(t, found)
	testkit.Eventually(t, patience, "the worker is stopped", func() bool { return testkit.Stopped(t, started.Pid()) })

	entries, err := d.redis.XRange(t.Context(), d.stream(), "-", "+").Result()
	require.NoError(t, err)
	require.NoError(t, d.redis.XAck(t.Context(), d.stream(), reservation.Group, entries[0].ID).Err())
	over = true
	_, err = freeze()
	require.ErrorIs(t, err, errTooShort)
}
