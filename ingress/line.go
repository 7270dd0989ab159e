package ingress

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"net/http"
	"sync"
	"time"

	"stampede/draw"
	"stampede/reservation/problems"
)

const (
	// inLineMax calls wait in a line, and addressPlaces of an address where streams are bounded, for lineTimeout.
	inLineMax     = 500
	addressPlaces = 8
	lineTimeout   = catalogTimeout
)

var problemTooManyInLine = fixed(problem{
	Kind: problems.RateLimited, retryAfter: retryPaused,
	detail: "This address has as many calls of this kind in line as it may have. Retry when one is answered.",
})

// line runs a few calls at a time that cost more than a look. The others wait. They hold no slot of inFlight, so that a
// crowd of them keeps no one else out.
type line struct {
	limits  *clientLimits
	callers streamLimits
	turns   chan struct{}
	// rests is how many times as long as a call took its turn stays unused.
	rests time.Duration
}

// newLine returns a line for calls on draws.
func (l *clientLimits) newLine() *line {
	in := &line{limits: l, turns: make(chan struct{}, lineTurns)}
	in.callers.all.limit = lineTurns + inLineMax
	in.callers.byAddress.limit = min(l.addressStreams, addressPlaces)
	in.callers.byAddress.refused = l.refused.WithLabelValues("address", "draws")
	in.callers.tooMany = problemTooManyInLine
	return in
}

// run has a client's call wait for its turn.
func (l *line) run(r *http.Request, do func() error) error {
	leave, err := l.limits.openStream(&l.callers, r, "")
	if err != nil {
		return err
	}
	defer leave()
	return l.take(r.Context(), do)
}

// take waits for a turn, outside of the places of addresses.
func (l *line) take(ctx context.Context, do func() error) error {
	limited, cancel := context.WithTimeout(ctx, lineTimeout)
	defer cancel()
	select {
	case l.turns <- struct{}{}:
		began := time.Now()
		defer func() {
			if rest := l.rests * time.Since(began); rest > 0 {
				time.AfterFunc(rest, func() { <-l.turns })
			} else {
				<-l.turns
			}
		}()
		return do()
	case <-limited.Done():
		return problemOverloaded
	}
}

const (
	// verifyRests keeps the verification of signatures, which anybody can ask for, to a fifth of a core.
	verifyRests = 4
	// verifiedMax bounds the signatures that are remembered.
	verifiedMax = 4096
)

// verifier verifies rounds of drand, each once.
type verifier struct {
	line *line

	mu    sync.Mutex
	known map[[sha256.Size]byte]error
}

// verify returns draw.ErrBeacon for what is not the signature of the round.
func (v *verifier) verify(r *http.Request, round int64, signature []byte) error {
	key := sha256.Sum256(binary.BigEndian.AppendUint64(signature[:len(signature):len(signature)], uint64(round)))
	if err, known := v.recall(key); known {
		return err
	}
	return v.line.run(r, func() error {
		err, known := v.recall(key) // another one had it verified meanwhile
		if known {
			return err
		}
		_, err = draw.BeaconSeed(round, signature)
		v.mu.Lock()
		defer v.mu.Unlock()
		if v.known == nil || len(v.known) >= verifiedMax {
			v.known = map[[sha256.Size]byte]error{}
		}
		v.known[key] = err
		return err
	})
}

func (v *verifier) recall(key [sha256.Size]byte) (err error, known bool) { //nolint:revive // known is of the map
	v.mu.Lock()
	defer v.mu.Unlock()
	err, known = v.known[key]
	return err, known
}
