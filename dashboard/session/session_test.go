package session

import (
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/operators"
)

// newSessions returns sessions of the operator admin, and what moves their clock on.
func newSessions(t *testing.T) (s *Sessions, pass func(time.Duration)) {
	t.Helper()
	registry, err := operators.New(operators.Config{AdminToken: "secret", Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	s = New(registry)
	now := time.Now()
	s.now = func() time.Time { return now }
	return s, func(d time.Duration) { now = now.Add(d) }
}

func login(t *testing.T, s *Sessions) (id string) {
	t.Helper()
	id, who, ok := s.Login("secret")
	require.True(t, ok)
	require.Equal(t, operators.Admin, who.Role)
	return id
}

func TestSessionEndsAfterItsLifetime(t *testing.T) {
	s, pass := newSessions(t)
	id := login(t, s)
	for left := Lifetime; left > 0; left -= IdleMax / 2 { // somebody uses it all the time
		_, ok := s.Find(id)
		require.True(t, ok, left)
		pass(IdleMax / 2)
	}
	pass(time.Second)
	_, ok := s.Find(id)
	require.False(t, ok)
	require.Empty(t, s.by)
}

func TestIdleSessionEnds(t *testing.T) {
	s, pass := newSessions(t)
	id := login(t, s)
	one, ok := s.Find(id)
	require.True(t, ok)
	done, ok := one.OpenStream()
	require.True(t, ok)
	pass(IdleMax + time.Second)
	require.True(t, one.Alive(), "an open page is no idle one")
	done()
	pass(IdleMax)
	require.True(t, one.Alive())
	pass(time.Second)
	require.False(t, one.Alive())
	_, ok = s.Find(id)
	require.False(t, ok)
}

func TestSessionsOfOperatorAreBounded(t *testing.T) {
	s, pass := newSessions(t)
	oldest := login(t, s)
	for range perOperator {
		pass(time.Second)
		login(t, s)
	}
	require.Len(t, s.by, perOperator)
	_, ok := s.Find(oldest)
	require.False(t, ok, "the oldest gives way")
}

func TestStreamsOfSessionAreBounded(t *testing.T) {
	s, _ := newSessions(t)
	one, ok := s.Find(login(t, s))
	require.True(t, ok)
	for range streamsMax {
		_, ok := one.OpenStream()
		require.True(t, ok)
	}
	_, ok = one.OpenStream()
	require.False(t, ok)
}
