package rig

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestPollIntervalShrinksWithRemainder(t *testing.T) {
	t.Parallel()
	assert.Equal(t, pollMin, nextPoll(0, 1000, time.Second))
	assert.Equal(t, 100*time.Millisecond, nextPoll(1000, 200, time.Second))
	assert.Equal(t, pollMin, nextPoll(1190, 10, time.Second))
	assert.Equal(t, pollMax, nextPoll(1, 1_000_000, time.Second))
}
