package retry_test

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/internal/retry"
)

func TestFlappingOutageIsLoggedAtBoundedRate(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	o := retry.Outage{Log: slog.New(slog.NewTextHandler(&log, nil)), Doing: "publish outcomes"}
	for range 135 {
		require.Positive(t, o.Failed(errors.New("i/o timeout")))
		require.True(t, o.Lasts())
		o.Over()
		require.False(t, o.Lasts())
	}
	began := strings.Count(log.String(), "cannot publish outcomes")
	ended := strings.Count(log.String(), "can publish outcomes")
	const firstLines = 5
	require.LessOrEqual(t, began, firstLines+1)
	require.Equal(t, began, ended)
}
