package pace

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestPacePausesOnlyAtHighRates(t *testing.T) {
	t.Parallel()
	at := func(ms int) time.Time {
		return time.UnixMilli(1_790_000_000_000).Add(time.Duration(ms) * time.Millisecond)
	}
	const readInterval = 10 * time.Millisecond
	p := Pace{Interval: readInterval, From: 2 * time.Millisecond}
	require.Zero(t, p.Pause(500, at(0)), "the first page gives no rate: it may have waited for an hour")
	require.Equal(t, readInterval, p.Pause(1, at(2)), "500 a second")
	require.Zero(t, p.Pause(1, at(5)))
	require.Zero(t, p.Pause(4, at(15)))
	require.Equal(t, readInterval, p.Pause(5, at(25)))
	require.Zero(t, p.Pause(500, at(1026)), "a page that took a second to arrive")
	require.Equal(t, readInterval, p.Pause(500, at(2026)))
	require.Zero(t, p.Pause(0, at(2027)))
}
