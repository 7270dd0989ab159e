package rig

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestPostgresIsAskedMoreOftenTheLessIsLeft(t *testing.T) {
	t.Parallel()
	assert.Equal(t, lookEvery, nextLook(0, 1000, time.Second))
	assert.Equal(t, 100*time.Millisecond, nextLook(1000, 200, time.Second))
	assert.Equal(t, lookEvery, nextLook(1190, 10, time.Second))
	assert.Equal(t, lookAtMost, nextLook(1, 1_000_000, time.Second))
}
