package lock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
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
	// receiptMS is how long Redis knows a call that comes again, or too late: five minutes. It and other
	// numbers are strings, because go-redis would make one of each.
	receiptMS = "300000"
	// noReceipt has an acquire leave none when it gets less than it asks for.
	noReceipt = "0"
)

// The modes and answers of the scripts.
const (
	modeEach = "each"
	modeAll  = "all"

	answerHeld     = "held"
	answerBusy     = "busy"
	answerFree     = "free"
	answerReleased = "released"
	answerNotified = "notified " // and by how many connections
	answerRenewed  = "renewed"
	answerLost     = "lost"
)

// taking is what Redis answered to an acquire.
type acquireReply struct {
	token     int64
	wait      time.Duration // until the busy locks are free if nobody renews them; 0 if that is not known
	listeners int           // connections that wait for the first busy lock; 0 if it was not asked for
	answers   []string      // for each key
}

// sendAcquire asks for locks. A caller that waits will ask again by the same call, and in the end release.
func (l *Locker) sendAcquire(ctx context.Context, g *grant, mode string, waits bool, keys []string, lease time.Duration) (acquireReply, error) {
	names := make([]string, 0, 2+len(keys))
	names = append(names, l.inSlotOf(keys[0], string(g.acquireCall.receipt)), l.inSlotOf(keys[0], l.fence))
	names = append(names, keys...)
	receipt := receiptMS
	if waits {
		receipt = noReceipt
	}
	reply, err := lua.LockAcquire.Run(ctx, l.rdb, names, decimal(g.acquireCall.serial), receipt, g.owner,
		decimal(uint64(lease.Milliseconds())), mode, l.numsubCommand(waits)).Slice()
	if err != nil {
		return acquireReply{}, err
	}
	const before = 3 // the answers for the keys
	if len(reply) != before+len(keys) {
		return acquireReply{}, fmt.Errorf("%d answers for %d keys", len(reply)-before, len(keys))
	}
	digits, _ := reply[0].(string)
	token, err := strconv.ParseInt(digits, 10, 64)
	if err != nil {
		return acquireReply{}, fmt.Errorf("answer %v where a token was due: %w", reply[0], err)
	}
	waitMS, isWait := reply[1].(int64)
	listeners, isCount := reply[2].(int64)
	if !isWait || !isCount {
		return acquireReply{}, fmt.Errorf("answers %v and %v where a time and a count were due", reply[1], reply[2])
	}
	answers := make([]string, len(keys))
	for i, answer := range reply[before:] {
		word, _ := answer.(string)
		if word != answerHeld && word != answerBusy && word != answerFree {
			return acquireReply{}, fmt.Errorf("unknown answer %q", answer)
		}
		answers[i] = word
	}
	return acquireReply{token: token, wait: time.Duration(waitMS) * time.Millisecond, listeners: int(listeners), answers: answers}, nil
}

// listeners is the command that tells how many hear of a release, for those who wait for it.
func (l *Locker) numsubCommand(waits bool) string {
	switch {
	case !waits:
		return "none"
	case l.clustered:
		return "shardnumsub"
	}
	return "numsub"
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
	return parseAnswers(answerRenewed, len(holds), lua.LockRenew.Run(ctx, l.rdb, names, args...))
}

// sendRelease tells of each key whether it was released, rather than lost before.
func (l *Locker) sendRelease(ctx context.Context, c call, owner string, keys []string) ([]bool, error) {
	names := make([]string, 0, 1+len(keys))
	names = append(append(names, l.inSlotOf(keys[0], string(c.receipt))), keys...)
	cmd := lua.LockRelease.Run(ctx, l.rdb, names, decimal(c.serial), receiptMS, owner, l.publishCommand())
	return parseAnswers(answerReleased, len(keys), cmd, func(i int, answer string) (is bool) {
		digits, is := strings.CutPrefix(answer, answerNotified)
		if listeners, err := strconv.Atoi(digits); is && err == nil {
			l.noteYield(keys[i], listeners, c.serial)
		}
		return is
	})
}

// publish is the command that tells of a release. In a cluster it is the one that Redisson listens to
// there, which also stays on the node of the lock.
func (l *Locker) publishCommand() string {
	if l.clustered {
		return "spublish"
	}
	return "publish"
}

// said holds an answer against its script's header, one of two words for each key or another one that is as good,
// and tells where a good one stands.
func parseAnswers(good string, keys int, cmd *redis.Cmd, asGood ...func(i int, answer string) bool) ([]bool, error) {
	answers, err := cmd.StringSlice()
	if err != nil {
		return nil, err
	}
	if len(answers) != keys {
		return nil, fmt.Errorf("%d answers for %d keys", len(answers), keys)
	}
	is := make([]bool, keys)
	for i, answer := range answers {
		is[i] = answer == good || slices.ContainsFunc(asGood, func(tells func(int, string) bool) bool { return tells(i, answer) })
		if !is[i] && answer != answerLost {
			return nil, fmt.Errorf("unknown answer %q", answer)
		}
	}
	return is, nil
}

// inSlotOf names a key of the Locker's own so that it lies in the slot of the locks of a call.
func (l *Locker) inSlotOf(first, name string) string {
	if l.clustered && hashTag(l.prefix) == l.prefix {
		return name + ":{" + hashTag(first) + "}"
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

// refused tells that Redis took a call for a mistake, or for one that is settled, so that no try of it has done
// anything or will: the scripts look at everything before they write. Other errors of Redis may be those of one
// try alone, as that there are too many connections.
func rejected(err error) bool {
	var reply redis.Error
	if !errors.As(err, &reply) {
		return false
	}
	return slices.ContainsFunc([]string{"WRONGTYPE ", "CROSSSLOT ", "NOPERM ", "ERR stale"}, func(kind string) bool {
		return strings.HasPrefix(reply.Error(), kind)
	})
}

// away tells that Redis cannot be asked for a while: nobody answers, or it says itself that it cannot serve yet,
// as after a restart or in a failover. A repeat of the call may find it back. What no repeat mends is not among
// these: a wrong password, a right that is missing, a key of another type, a client that is closed.
func unavailable(err error) bool {
	if err == nil { // mostly, and what follows allocates
		return false
	}
	var reply redis.Error
	var network net.Error
	switch {
	case errors.As(err, &reply):
		return slices.ContainsFunc([]string{
			"LOADING ", "READONLY ", "MASTERDOWN ", "CLUSTERDOWN ", "TRYAGAIN ", "NOREPLICAS ", "BUSY ", "MISCONF ", "max number of clients",
		}, func(kind string) bool { return redis.HasErrorPrefix(err, kind) })
	case errors.As(err, &network):
		return true
	}
	return slices.ContainsFunc([]error{
		io.EOF, io.ErrUnexpectedEOF, context.DeadlineExceeded, redis.ErrPoolTimeout, redis.ErrPoolExhausted,
	}, func(kind error) bool { return errors.Is(err, kind) })
}
