// Package session holds who is logged in to the dashboard. Sessions are in memory, of one process: a restart ends them.
// A session is bound to the hash of a token and to the operator whom that named: it ends when that operator is revoked,
// or gets another role.
package session

import (
	"crypto/rand"
	"crypto/sha256"
	"slices"
	"sync"
	"time"

	"stampede/internal/operators"
)

const (
	// Lifetime ends a session whatever happens, IdleMax one of which nothing was heard: no request, and no open stream.
	Lifetime = 12 * time.Hour
	IdleMax  = time.Hour
	// perOperator bounds the sessions of an operator: a further one ends the oldest. There are at most 257 operators.
	perOperator = 16
	// notesMax bounds the notes that wait for their page.
	notesMax = 8
	// streamsMax bounds the open streams of a session: one for each tab that is seen.
	streamsMax = 24
)

// Note is what an action had to say, for the next page.
type Note struct {
	// Failed is true if the action did not do what was asked for.
	Failed bool
	Text   string
	// Hint says what to do.
	Hint string
}

// Sessions are all sessions. It is safe for concurrent use.
type Sessions struct {
	operators *operators.Registry
	now       func() time.Time

	mu sync.Mutex
	// by has the sessions by the hash of their id, so that the time of a look-up reveals nothing about ids.
	by map[[sha256.Size]byte]*Session
}

// Session is one login.
type Session struct {
	all    *Sessions
	key    [sha256.Size]byte
	person operators.Person
	token  [sha256.Size]byte
	began  time.Time

	// The rest is under the mutex of all sessions.
	seen    time.Time
	ended   bool
	streams int
	notes   []Note
}

// New returns no sessions of these operators yet.
func New(registry *operators.Registry) *Sessions {
	return &Sessions{operators: registry, now: time.Now, by: make(map[[sha256.Size]byte]*Session)}
}

// Login returns the id of a new session of the operator with the token. It is random, so nobody can choose it before.
func (s *Sessions) Login(token string) (id string, who operators.Person, ok bool) {
	hash := sha256.Sum256([]byte(token))
	who, ok = s.operators.FindHash(hash)
	if !ok {
		return "", operators.Person{}, false
	}
	id = rand.Text() + rand.Text()
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	s.sweep(now)
	earlier := s.byOperator(who.Name)
	for i := range max(0, len(earlier)-perOperator+1) {
		s.end(earlier[i])
	}
	key := sha256.Sum256([]byte(id))
	s.by[key] = &Session{all: s, key: key, person: who, token: hash, began: now, seen: now}
	return id, who, true
}

// sweep ends the sessions that are over.
func (s *Sessions) sweep(now time.Time) {
	for _, one := range s.by {
		if !s.valid(one, now) {
			s.end(one)
		}
	}
}

// byOperator returns the sessions of an operator, the oldest first.
func (s *Sessions) byOperator(name string) (found []*Session) {
	for _, one := range s.by {
		if one.person.Name == name {
			found = append(found, one)
		}
	}
	slices.SortFunc(found, func(a, b *Session) int { return a.began.Compare(b.began) })
	return found
}

func (s *Sessions) end(one *Session) {
	one.ended, one.notes = true, nil
	delete(s.by, one.key)
}

func (s *Sessions) valid(one *Session, now time.Time) bool {
	if one.ended || now.Sub(one.began) > Lifetime || one.streams == 0 && now.Sub(one.seen) > IdleMax {
		return false
	}
	who, known := s.operators.FindHash(one.token)
	return known && who == one.person
}

// Find returns the session with the id, unless it is over.
func (s *Sessions) Find(id string) (*Session, bool) {
	if id == "" {
		return nil, false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	one, known := s.by[sha256.Sum256([]byte(id))]
	if !known {
		return nil, false
	}
	now := s.now()
	if !s.valid(one, now) {
		s.end(one)
		return nil, false
	}
	one.seen = now
	return one, true
}

// Person is the operator whose session it is.
func (s *Session) Person() operators.Person { return s.person }

// Alive reports whether the session is still in force.
func (s *Session) Alive() bool {
	s.all.mu.Lock()
	defer s.all.mu.Unlock()
	return s.all.valid(s, s.all.now())
}

// End logs out.
func (s *Session) End() {
	s.all.mu.Lock()
	defer s.all.mu.Unlock()
	s.all.end(s)
}

// Tell keeps a note for the next page of the session.
func (s *Session) Tell(n Note) {
	s.all.mu.Lock()
	defer s.all.mu.Unlock()
	s.notes = append(s.notes, n)
	s.notes = s.notes[max(0, len(s.notes)-notesMax):]
}

// Notes returns the notes that were kept, once.
func (s *Session) Notes() (notes []Note) {
	s.all.mu.Lock()
	defer s.all.mu.Unlock()
	notes, s.notes = s.notes, nil
	return notes
}

// OpenStream counts a stream of the session, unless it has too many. The session does not idle while one is open.
func (s *Session) OpenStream() (done func(), ok bool) {
	s.all.mu.Lock()
	defer s.all.mu.Unlock()
	if s.streams >= streamsMax {
		return nil, false
	}
	s.streams++
	return func() {
		s.all.mu.Lock()
		defer s.all.mu.Unlock()
		s.streams--
		s.seen = s.all.now()
	}, true
}
