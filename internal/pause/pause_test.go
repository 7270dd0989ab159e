package pause_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/pause"
)

func TestForWaitsUntilTheTimeHasPassedOrIsBrokenOff(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		done := make(chan struct{})
		require.True(t, pause.For(time.Second, done))
		require.Equal(t, time.Second, time.Since(began))

		time.AfterFunc(time.Second, func() { close(done) })
		require.False(t, pause.For(time.Minute, done))
		require.Equal(t, 2*time.Second, time.Since(began))
		require.False(t, pause.For(0, done), "closed already")
		require.True(t, pause.For(-time.Second, nil), "passed already")
	})
}
