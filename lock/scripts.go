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
	// keysPerCall bounds a script call, because Redis serves no other client while it runs: about a
	// millisecond for 512 locks. A batch of orders fits into one call.
	keysPerCall = 512
	// renewalsPerCall is smaller: renewals run at any time and delay calls that do not expect it.
	renewalsPerCall = 256
	// receiptMS is how long Redis recognizes a repeated or late call: five minutes. Numbers are
	// strings here because go-redis would convert them each time.
	receiptMS = "300000"
	// noReceipt means that an acquire leaves no receipt.
	noReceipt = "0"
)

// Modes and answers of the scripts.
const (
	modeEach = "each"
	modeAll  = "all"

	answerHeld     = "held"
	answerBusy     = "busy"
	answerFree     = "free"
	answerReleased = "released"
	answerNotified = "notified " // followed by the number of connections
	answerRenewed  = "renewed"
	answerLost     = "lost"
)

// acquireReply is the answer to an acquire.
type acquireReply struct {
	token     int64
	wait      time.Duration // until the busy locks end unless they are renewed; 0 if unknown
	listeners int           // connections that listen for the first busy lock; 0 if not asked for
	answers   []string      // one for each key
}

// sendAcquire asks for locks. A caller with waits set repeats the call, and releases it in the end.
func (l *Locker) sendAcquire(
	ctx context.Context, g *grant, mode string, waits bool, keys []string, lease time.Duration,
) (acquireReply, error) {
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
	const before = 3 // values before the answers
	if len(reply) != before+len(keys) {
		return acquireReply{}, fmt.Errorf("%d answers for %d keys", len(reply)-before, len(keys))
	}
	digits, _ := reply[0].(string)
	token, err := strconv.ParseInt(digits, 10, 64)
	if err != nil {
		return acquireReply{}, fmt.Errorf("unexpected answer %v, want a token: %w", reply[0], err)
	}
	waitMS, isWait := reply[1].(int64)
	listeners, isCount := reply[2].(int64)
	if !isWait || !isCount {
		return acquireReply{}, fmt.Errorf("unexpected answers %v and %v, want a time and a count", reply[1], reply[2])
	}
	answers := make([]string, len(keys))
	for i, answer := range reply[before:] {
		word, _ := answer.(string)
		if word != answerHeld && word != answerBusy && word != answerFree {
			return acquireReply{}, fmt.Errorf("unknown answer %q", answer)
		}
		answers[i] = word
	}
	return acquireReply{
		token: token, wait: time.Duration(waitMS) * time.Millisecond, listeners: int(listeners), answers: answers,
	}, nil
}

// numsubCommand counts the connections that listen for a release. Only waiters need the number.
func (l *Locker) numsubCommand(waits bool) string {
	switch {
	case !waits:
		return "none"
	case l.clustered:
		return "shardnumsub"
	}
	return "numsub"
}

// sendRenew reports for each hold whether it was renewed; otherwise it was lost.
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

// sendRelease reports for each key whether it was released; otherwise it was lost.
func (l *Locker) sendRelease(ctx context.Context, c scriptCall, owner string, keys []string) ([]bool, error) {
	names := make([]string, 0, 1+len(keys))
	names = append(append(names, l.inSlotOf(keys[0], string(c.receipt))), keys...)
	cmd := lua.LockRelease.Run(ctx, l.rdb, names, decimal(c.serial), receiptMS, owner, l.publishCommand())
	return parseAnswers(answerReleased, len(keys), cmd, func(i int, answer string) (is bool) {
		digits, is := strings.CutPrefix(answer, answerNotified)
		if listeners, err := strconv.Atoi(digits); is && err == nil {
			l.noteListeners(keys[i], listeners, c.serial)
		}
		return is
	})
}

// publishCommand announces a release. In a cluster Redisson listens to sharded channels, whose
// messages stay on the node of the lock.
func (l *Locker) publishCommand() string {
	if l.clustered {
		return "spublish"
	}
	return "publish"
}

// parseAnswers reports which answers are good, or accepted by asGood, and fails on words that the
// script's header does not list.
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
		is[i] = answer == good || slices.ContainsFunc(asGood, func(accepts func(int, string) bool) bool {
			return accepts(i, answer)
		})
		if !is[i] && answer != answerLost {
			return nil, fmt.Errorf("unknown answer %q", answer)
		}
	}
	return is, nil
}

// inSlotOf puts the name of one of the Locker's own keys into the slot of a lock.
func (l *Locker) inSlotOf(first, name string) string {
	if l.clustered && hashTag(l.prefix) == l.prefix {
		return name + ":{" + hashTag(first) + "}"
	}
	return name
}

// hashTag is the part of a key that decides its slot in a Redis Cluster: the text between the first
// { and the next }, or the whole key if there is none.
func hashTag(key string) string {
	if _, rest, found := strings.Cut(key, "{"); found {
		if tag, _, closed := strings.Cut(rest, "}"); closed && tag != "" {
			return tag
		}
	}
	return key
}

// rejected reports an error that proves that no attempt of the call did or will do anything: the
// scripts check everything before they write. Other errors may concern one attempt only, for
// example too many connections.
func rejected(err error) bool {
	var reply redis.Error
	if !errors.As(err, &reply) {
		return false
	}
	return slices.ContainsFunc([]string{"WRONGTYPE ", "CROSSSLOT ", "NOPERM ", "ERR stale"}, func(kind string) bool {
		return strings.HasPrefix(reply.Error(), kind)
	})
}

// isUnavailable reports an error that a later attempt may not see: no answer, or an answer that Redis
// cannot serve now, as after a restart or in a failover. A wrong password, a missing right, a key
// of another type and a closed client are not among these.
func isUnavailable(err error) bool {
	if err == nil { // the common case; the checks below allocate
		return false
	}
	var reply redis.Error
	var network net.Error
	switch {
	case errors.As(err, &reply):
		return slices.ContainsFunc([]string{
			"LOADING ", "READONLY ", "MASTERDOWN ", "CLUSTERDOWN ", "TRYAGAIN ", "NOREPLICAS ", "BUSY ", "MISCONF ",
			"max number of clients",
		}, func(kind string) bool { return redis.HasErrorPrefix(err, kind) })
	case errors.As(err, &network):
		return true
	}
	return slices.ContainsFunc([]error{
		io.EOF, io.ErrUnexpectedEOF, context.DeadlineExceeded, redis.ErrPoolTimeout, redis.ErrPoolExhausted,
	}, func(kind error) bool { return errors.Is(err, kind) })
}
