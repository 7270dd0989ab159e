package lock

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"stampede/lua"
)

const (
	// keysPerCall bounds a script call, because Redis serves nobody else while it runs: 512 locks take
	// it about a millisecond. It is above the orders of a batch, so that a batch is one call.
	keysPerCall = 512
	// renewalsPerCall is less, because whoever asks for the locks of a batch knows that it is large, and
	// renewals come at any time.
	renewalsPerCall = 256
	// receiptTTL is how long Redis knows a call that comes again, or too late.
	receiptTTL = 5 * time.Minute
)

// The modes and answers of the scripts.
const (
	modeEach = "each"
	modeAll  = "all"

	answerHeld     = "held"
	answerBusy     = "busy"
	answerFree     = "free"
	answerReleased = "released"
	answerRenewed  = "renewed"
	answerLost     = "lost"
)

// call tells the tries of one script call from any other one: serials grow with every call of a
// Locker, and no two calls that are not settled share a receipt.
type call struct {
	receipt int
	serial  uint64
}

// receipts hands out the numbers of those that no call uses, the one that was used last first.
type receipts struct {
	unused []int
	made   int
}

func (r *receipts) take() int {
	if n := len(r.unused); n > 0 {
		last := r.unused[n-1]
		r.unused = r.unused[:n-1]
		return last
	}
	r.made++
	return r.made
}

func (r *receipts) giveBack(n int) { r.unused = append(r.unused, n) }

// newCall needs mu.
func (l *Locker) newCall() call {
	return call{receipt: l.receipts.take(), serial: l.nextSerial()}
}

// nextSerial needs mu.
func (l *Locker) nextSerial() uint64 {
	l.serial++
	return l.serial
}

func (l *Locker) settle(c call) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.receipts.giveBack(c.receipt)
}

func (l *Locker) receiptKey(c call, first string) string {
	return l.ownKey("receipt", first) + ":" + l.id + ":" + strconv.Itoa(c.receipt)
}

// ownKey names a key of the Locker's own so that it lies in the slot of the locks of the call.
func (l *Locker) ownKey(kind, first string) string {
	name := l.prefix + ":" + kind
	if l.clustered {
		name += ":{" + hashTag(first) + "}"
	}
	return name
}

// hashTag is the part of a key that decides in which slot of a Redis Cluster it lies: what is between
// the first { and the } after it, if that is not empty, and else the whole key.
func hashTag(key string) string {
	if _, rest, found := strings.Cut(key, "{"); found {
		if tag, _, closed := strings.Cut(rest, "}"); closed && tag != "" {
			return tag
		}
	}
	return key
}

// publish is the command that tells of a release. In a cluster it is the one that Redisson listens to
// there, which also stays on the node of the lock.
func (l *Locker) publish() string {
	if l.clustered {
		return "spublish"
	}
	return "publish"
}

// taking is what Redis answered to an acquire.
type taking struct {
	token   int64
	wait    time.Duration // until the busy locks are free if nobody renews them; 0 if that is not known
	answers []string      // for each key
}

func (l *Locker) sendAcquire(ctx context.Context, c call, owner, mode string, keys []string, lease time.Duration) (taking, error) {
	names := make([]string, 0, 2+len(keys))
	names = append(append(names, l.receiptKey(c, keys[0]), l.ownKey("fence", keys[0])), keys...)
	reply, err := lua.LockAcquire.Run(ctx, l.rdb, names,
		c.serial, receiptTTL.Milliseconds(), owner, lease.Milliseconds(), mode).Slice()
	if err != nil {
		return taking{}, err
	}
	if len(reply) != 2+len(keys) {
		return taking{}, fmt.Errorf("%d answers for %d keys", len(reply)-2, len(keys))
	}
	token, isToken := reply[0].(int64)
	waitMS, isWait := reply[1].(int64)
	if !isToken || !isWait {
		return taking{}, fmt.Errorf("answers %T and %T where a token and a time were due", reply[0], reply[1])
	}
	answers := make([]string, len(keys))
	for i, answer := range reply[2:] {
		word, _ := answer.(string)
		if word != answerHeld && word != answerBusy && word != answerFree {
			return taking{}, fmt.Errorf("unknown answer %q", answer)
		}
		answers[i] = word
	}
	return taking{token: token, wait: time.Duration(waitMS) * time.Millisecond, answers: answers}, nil
}

// sendRelease tells of each key whether it was released, rather than lost before.
func (l *Locker) sendRelease(ctx context.Context, c call, owner string, keys []string) ([]bool, error) {
	names := append([]string{l.receiptKey(c, keys[0])}, keys...)
	return said(answerReleased, len(keys),
		lua.LockRelease.Run(ctx, l.rdb, names, c.serial, receiptTTL.Milliseconds(), owner, l.publish()))
}

// sendRenew tells of each hold whether it was renewed, rather than lost before.
func (l *Locker) sendRenew(ctx context.Context, holds []*hold, lease time.Duration) ([]bool, error) {
	names := make([]string, len(holds))
	args := make([]any, 0, 1+len(holds))
	args = append(args, lease.Milliseconds())
	for i, h := range holds {
		names[i] = h.key
		args = append(args, h.owner)
	}
	return said(answerRenewed, len(holds), lua.LockRenew.Run(ctx, l.rdb, names, args...))
}

// said holds an answer against its script's header, one of two words for each key, and tells where the
// good one stands.
func said(good string, keys int, cmd *redis.Cmd) ([]bool, error) {
	answers, err := cmd.StringSlice()
	if err != nil {
		return nil, err
	}
	if len(answers) != keys {
		return nil, fmt.Errorf("%d answers for %d keys", len(answers), keys)
	}
	is := make([]bool, keys)
	for i, answer := range answers {
		if !slices.Contains([]string{good, answerLost}, answer) {
			return nil, fmt.Errorf("unknown answer %q", answer)
		}
		is[i] = answer == good
	}
	return is, nil
}

// ForceRelease takes the lock of a key away from whoever holds it, in this process or another one or
// in a Java service, wakes those who wait for it, and tells whether anybody held it. The holder hears of
// it when it next renews or releases the lock. It is for operators: a lock that a dead process left
// ends by itself.
func (l *Locker) ForceRelease(ctx context.Context, key string) (held bool, err error) {
	if err := l.validateKey(key); err != nil {
		return false, err
	}
	answer, err := lua.LockForce.Run(ctx, l.rdb, []string{key}, l.publish()).Text()
	switch {
	case err != nil:
		return false, fmt.Errorf("force the release of lock %q: %w", key, err)
	case answer != answerReleased && answer != answerFree:
		return false, fmt.Errorf("force the release of lock %q: unknown answer %q", key, answer)
	}
	return answer == answerReleased, nil
}
