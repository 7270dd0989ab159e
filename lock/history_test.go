package lock_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lock"
)

const (
	// historyMax bounds the operations of a history: the search for an order of an illegal one
	// grows quickly.
	historyMax = 200
	// searchMax bounds that search. No result by then fails the test.
	searchMax = time.Minute
)

// A client acquires the lock, reads the register and writes it, each with the token of its lock.
const (
	opAcquire = "acquire"
	opRead    = "read"
	opWrite   = "write"
)

type opRequest struct {
	kind  string
	token int64
	value int // to write
}

type opReply struct {
	refused bool
	value   int // that was read
	// held is set if the client still had the lock after the answer.
	held bool
}

// register is the state of the model: a number, the largest token that read or wrote it, and the
// largest token that was given.
type register struct {
	given, fence int64
	value        int
}

// fencedRegister models the lock and the row together. Tokens grow in the order in which they are
// given. A read or a write is refused if and only if its token is smaller than an earlier one. A
// holder of the lock is never refused. Reads carry the token too: otherwise the previous holder
// could overwrite a value after the new holder has read it.
var fencedRegister = porcupine.Model{
	Init: func() any { return register{} },
	Step: func(state, input, output any) (bool, any) {
		s, in, out := state.(register), input.(opRequest), output.(opReply)
		if in.kind == opAcquire {
			legal := in.token > s.given
			s.given = in.token
			return legal, s
		}
		if out.refused {
			return in.token < s.fence && !out.held, s
		}
		legal := in.token >= s.fence && (in.kind == opWrite || out.value == s.value)
		s.fence = in.token
		if in.kind == opWrite {
			s.value = in.value
		}
		return legal, s
	},
	DescribeOperation: func(input, output any) string { return fmt.Sprintf("%+v -> %+v", input, output) },
}

// check reports whether the model allows an order of the operations.
func check(t *testing.T, history []porcupine.Operation) bool {
	t.Helper()
	require.NotEmpty(t, history)
	require.LessOrEqual(t, len(history), historyMax)
	result := porcupine.CheckOperationsTimeout(fencedRegister, history, searchMax)
	require.NotEqual(t, porcupine.Unknown, result, "the search for an order ended without a result")
	return result == porcupine.Ok
}

// registry is a register in Postgres with the history of its clients.
type registry struct {
	rows  *pgxpool.Pool
	table string
	// unfenced registers do not compare tokens.
	unfenced bool
	start    time.Time

	mu       sync.Mutex
	history  []porcupine.Operation
	accepted int // writes
	refused  int
	// overtaken is closed at the next read.
	overtaken chan struct{}
}

// newRegistry creates a register in a database that tests may share.
func newRegistry(t *testing.T, rows *pgxpool.Pool) *registry {
	t.Helper()
	r := &registry{
		rows: rows, table: "register_" + strings.ToLower(rand.Text()), start: time.Now(),
		overtaken: make(chan struct{}),
	}
	_, err := r.rows.Exec(t.Context(), fmt.Sprintf(
		`CREATE TABLE %[1]s (fence bigint NOT NULL, value int NOT NULL); INSERT INTO %[1]s VALUES (0, 0)`, r.table))
	require.NoError(t, err)
	return r
}

// update sets the fence and other columns of the register, unless the token is too small.
func (r *registry) update(columns string) string {
	statement := "UPDATE " + r.table + " SET fence = $1" + columns
	if r.unfenced {
		return statement
	}
	return statement + " WHERE fence <= $1"
}

// session is a client that holds the lock.
type session struct {
	*registry
	client int
	lease  *lock.Lease
	token  int64
}

func (r *registry) acquire(ctx context.Context, client int, l *lock.Locker, key string,
	opts ...lock.AcquireOption,
) (session, error) {
	call := time.Since(r.start)
	lease, err := l.Acquire(ctx, key, opts...)
	if err != nil {
		return session{}, err
	}
	s := session{registry: r, client: client, lease: lease, token: lease.Token(key)}
	s.note(call, opRequest{kind: opAcquire, token: s.token}, opReply{})
	return s, nil
}

// read also returns a channel that is closed when another client has read.
func (s session) read(ctx context.Context) (value int, overtaken <-chan struct{}, refused bool, err error) {
	call := time.Since(s.start)
	err = s.rows.QueryRow(ctx, s.update("")+" RETURNING value", s.token).Scan(&value)
	if refused = errors.Is(err, pgx.ErrNoRows); refused {
		err = nil
	}
	if err != nil {
		return 0, nil, false, err
	}
	s.note(call, opRequest{kind: opRead, token: s.token},
		opReply{refused: refused, value: value, held: s.lease.Err() == nil})
	s.mu.Lock()
	defer s.mu.Unlock()
	if !refused {
		close(s.overtaken)
		s.overtaken = make(chan struct{})
	}
	return value, s.overtaken, refused, nil
}

func (s session) write(ctx context.Context, value int) error {
	call := time.Since(s.start)
	tag, err := s.rows.Exec(ctx, s.update(", value = $2"), s.token, value)
	if err != nil {
		return err
	}
	refused := tag.RowsAffected() == 0
	s.note(call, opRequest{kind: opWrite, token: s.token, value: value},
		opReply{refused: refused, held: s.lease.Err() == nil})
	return nil
}

func (s session) note(call time.Duration, in opRequest, out opReply) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case out.refused:
		s.refused++
	case in.kind == opWrite:
		s.accepted++
	}
	s.history = append(s.history, porcupine.Operation{
		ClientId: s.client, Input: in, Call: call.Nanoseconds(), Output: out, Return: time.Since(s.start).Nanoseconds(),
	})
}

func (r *registry) value(t *testing.T) (value int) {
	t.Helper()
	require.NoError(t, r.rows.QueryRow(t.Context(), "SELECT value FROM "+r.table).Scan(&value))
	return value
}

// crowd lets clients of several Lockers increment the register. Their leases are short. One session
// of so many stalls after its read until its lease has ended, or until another client has read.
func crowd(b bench, rows *pgxpool.Pool, seed uint64, clients, sessions, stalls int) *registry {
	t := b.t
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute) // a lock that is never released would block the clients
	defer cancel()
	r := newRegistry(t, rows)
	key := b.key("register")
	lockers := []*lock.Locker{
		b.Locker,
		newLocker(t, b.rdb, lock.WithLease(150*time.Millisecond)),
		newLocker(t, b.rdb, lock.WithLease(time.Second), lock.WithPoll(10*time.Millisecond)),
	}
	var all sync.WaitGroup
	for client := range clients {
		random := mathrand.New(mathrand.NewPCG(seed, uint64(client)))
		all.Go(func() {
			for range sessions {
				if err := r.count(ctx, random, stalls, client, lockers[client%len(lockers)], key); !assert.NoError(t, err) {
					return
				}
			}
		})
	}
	all.Wait()
	return r
}

// count is one session.
func (r *registry) count(ctx context.Context, random *mathrand.Rand, stalls, client int, l *lock.Locker,
	key string,
) error {
	length := time.Duration(10+random.IntN(40)) * time.Millisecond
	opts := []lock.AcquireOption{lock.For(length)}
	stall := random.IntN(2 * stalls) // 0 and 1 stall
	if random.IntN(2) == 0 && stall > 1 {
		opts = nil // renewed by the watchdog
	}
	s, err := r.acquire(ctx, client, l, key, opts...)
	if errors.Is(err, lock.ErrLost) {
		return nil // the lease ended before the answer
	}
	if err != nil {
		return err
	}
	value, overtaken, refused, err := s.read(ctx)
	if err != nil {
		return err
	}
	switch stall {
	case 0:
		<-s.lease.Context(ctx).Done()
	case 1:
		select {
		case <-overtaken:
		case <-time.After(4 * length): // no other client is left
		}
	}
	if !refused {
		if err := s.write(ctx, value+1); err != nil {
			return err
		}
	}
	if err := s.lease.Release(ctx); !errors.Is(err, lock.ErrLost) {
		return err
	}
	return nil
}

func TestFencedRegisterIsLinearizable(t *testing.T) {
	const clients, sessions, opsOfSession = 6, 11, 3
	require.LessOrEqual(t, clients*sessions*opsOfSession, historyMax)
	t.Parallel()
	rows := testkit.Pool(t)
	for range 3 {
		seed := mathrand.Uint64()
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			r := crowd(setup(t), rows, seed, clients, sessions, 2)
			assert.True(t, check(t, r.history), "no order explains this history:\n%s", describe(r.history))
			assert.Positive(t, r.refused, "no client was late: the test shows nothing")
			assert.Positive(t, r.accepted)
			assert.Equal(t, r.accepted, r.value(t), "every accepted increment counts once")
		})
	}
}

// overtake stalls a client between its read and its write until another client has done both.
func overtake(t *testing.T, rows *pgxpool.Pool, unfenced bool) *registry {
	t.Helper()
	b := setup(t)
	ctx := t.Context()
	r := newRegistry(t, rows)
	r.unfenced = unfenced
	late, err := r.acquire(ctx, 0, b.Locker, b.key("register"), lock.For(2*time.Second))
	require.NoError(t, err)
	value, _, refused, err := late.read(ctx)
	require.NoError(t, err)
	require.False(t, refused)
	inTime, err := r.acquire(ctx, 1, b.Locker, b.key("register"), lock.For(time.Minute))
	require.NoError(t, err)
	same, _, refused, err := inTime.read(ctx)
	require.NoError(t, err)
	require.False(t, refused)
	require.Equal(t, value, same)
	require.NoError(t, inTime.write(ctx, same+1))
	require.NoError(t, late.write(ctx, value+1))
	require.NoError(t, inTime.lease.Release(ctx))
	return r
}

func TestCheckFindsAnUnfencedRegister(t *testing.T) {
	t.Parallel()
	rows := testkit.Pool(t)
	for name, unfenced := range map[string]bool{"compares": false, "does not": true} {
		t.Run(name, func(t *testing.T) {
			r := overtake(t, rows, unfenced)
			assert.Equal(t, !unfenced, check(t, r.history))
			assert.Equal(t, unfenced, r.accepted != r.value(t), "an increment is lost")
		})
	}
}

// Each case changes one operation of a legal history.
func TestCheckFindsEachIllegalOperation(t *testing.T) {
	right := []porcupine.Operation{
		{Input: opRequest{kind: opAcquire, token: 1}, Output: opReply{}},
		{Input: opRequest{kind: opRead, token: 1}, Output: opReply{value: 0, held: true}},
		{Input: opRequest{kind: opAcquire, token: 2}, Output: opReply{}},
		{Input: opRequest{kind: opRead, token: 2}, Output: opReply{value: 0, held: true}},
		{Input: opRequest{kind: opWrite, token: 1, value: 1}, Output: opReply{refused: true}},
		{Input: opRequest{kind: opWrite, token: 2, value: 1}, Output: opReply{held: true}},
		{Input: opRequest{kind: opAcquire, token: 3}, Output: opReply{}},
		{Input: opRequest{kind: opRead, token: 3}, Output: opReply{value: 1, held: true}},
	}
	for i := range right {
		right[i].Call, right[i].Return = int64(10*i), int64(10*i+5)
	}
	require.True(t, check(t, right))
	for what, change := range map[string]struct {
		at  int
		in  opRequest
		out opReply
	}{
		"a repeated token":        {2, opRequest{kind: opAcquire, token: 1}, opReply{}},
		"a smaller token":         {6, opRequest{kind: opAcquire, token: 1}, opReply{}},
		"an accepted stale write": {4, opRequest{kind: opWrite, token: 1, value: 1}, opReply{}},
		"a refused holder": {
			5,
			opRequest{kind: opWrite, token: 2, value: 1},
			opReply{refused: true, held: true},
		},
		"a refused write with the latest token": {5, opRequest{kind: opWrite, token: 2, value: 1}, opReply{refused: true}},
		"a lost write":                          {7, opRequest{kind: opRead, token: 3}, opReply{value: 0, held: true}},
		"a refused read with the latest token":  {7, opRequest{kind: opRead, token: 3}, opReply{refused: true}},
		"a late client that held the lock": {
			4,
			opRequest{kind: opWrite, token: 1, value: 1},
			opReply{refused: true, held: true},
		},
	} {
		wrong := slices.Clone(right)
		wrong[change.at].Input, wrong[change.at].Output = change.in, change.out
		assert.False(t, check(t, wrong), what)
	}
}

func describe(history []porcupine.Operation) string {
	var lines []byte
	for _, op := range history {
		lines = fmt.Appendf(lines, "%d: %s at %v to %v\n", op.ClientId, fencedRegister.DescribeOperation(op.Input, op.Output),
			time.Duration(op.Call), time.Duration(op.Return))
	}
	return string(lines)
}
