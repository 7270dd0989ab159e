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
	answerNotified = "notified" // followed by the number of connections
	answerRenewed  = "renewed"
	answerLost     = "lost"
)

// scripts are the calls to Redis. An error may leave the outcome unknown.
type scripts struct {
	rdb       redis.UniversalClient
	clustered bool
	prefix    string
	vanishing bool // MayVanish
}

// acquireReply is the answer to an acquire.
type acquireReply struct {
	token     int64
	wait      time.Duration // until the busy locks end unless they are renewed; 0 if unknown
	listeners int           // connections that listen for the first busy lock; 0 if not asked for
	answers   []string      // one for each key
}

// busy returns the keys of the call that others hold.
func (r acquireReply) busy(keys []string) []string {
	var busy []string
	for i, answer := range r.answers {
		if answer == answerBusy {
			busy = append(busy, keys[i])
		}
	}
	return busy
}

// sendAcquire asks for locks. A caller with waits set repeats the call, and releases it in the end.
// Only such a caller needs to know how many connections listen.
func (s scripts) sendAcquire(
	ctx context.Context, g *grant, mode string, waits bool, keys []string, lease time.Duration,
) (acquireReply, error) {
	names := append([]string{
		s.inSlotWith(keys[0], string(g.acquireCall.receipt)), s.inSlotWith(keys[0], s.prefix+":fence"),
	}, keys...)
	receipt, numsub := receiptMS, "none"
	switch {
	case waits && s.vanishing:
		receipt = noReceipt
	case waits && s.clustered:
		receipt, numsub = noReceipt, "shardnumsub"
	case waits:
		receipt, numsub = noReceipt, "numsub"
	}
	reply, err := lua.LockAcquire.Run(ctx, s.rdb, names, decimal(g.acquireCall.serial), receipt, g.owner,
		decimal(uint64(lease.Milliseconds())), mode, numsub, s.kept()).Slice()
	if err != nil {
		return acquireReply{}, err
	}
	const before = 3 // values before the answers
	if len(reply) != before+len(keys) {
		return acquireReply{}, fmt.Errorf("%d answers for %d keys", len(reply)-before, len(keys))
	}
	digits, _ := reply[0].(string)
	token, err := strconv.ParseInt(digits, 10, 64)
	waitMS, isWait := reply[1].(int64)
	listeners, isCount := reply[2].(int64)
	if err != nil || !isWait || !isCount {
		return acquireReply{}, fmt.Errorf("unexpected answers %v, want a token, a time and a count", reply[:before])
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

// sendRenew reports for each hold whether it was renewed; otherwise it was lost.
func (s scripts) sendRenew(ctx context.Context, holds []*hold, lease time.Duration) ([]bool, error) {
	args := make([]any, 0, 2+len(holds))
	args = append(args, lease.Milliseconds(), s.kept())
	for _, h := range holds {
		args = append(args, h.owner)
	}
	renewed := make([]bool, len(holds))
	err := parseAnswers(lua.LockRenew.Run(ctx, s.rdb, holdKeys(holds), args...), len(holds),
		func(i int, answer string) bool {
			renewed[i] = answer == answerRenewed
			return renewed[i]
		})
	return renewed, err
}

// lostLock stands for the number of listeners of a lock that was lost before its release.
const lostLock = -1

// sendRelease returns for each key how many connections were notified, 0 for none or if that is
// unknown, or lostLock.
func (s scripts) sendRelease(ctx context.Context, c scriptCall, owner string, keys []string) ([]int, error) {
	names := append([]string{s.inSlotWith(keys[0], string(c.receipt))}, keys...)
	notified := make([]int, len(keys))
	err := parseAnswers(lua.LockRelease.Run(ctx, s.rdb, names, decimal(c.serial), receiptMS, owner, s.publish(), s.kept()),
		len(keys), func(i int, answer string) bool {
			word, digits, _ := strings.Cut(answer, " ")
			notified[i], _ = strconv.Atoi(digits)
			if answer == answerLost {
				notified[i] = lostLock
			}
			return word == answerReleased || word == answerNotified
		})
	return notified, err
}

// sendForce reports whether the lock was held.
func (s scripts) sendForce(ctx context.Context, c scriptCall, key string) (bool, error) {
	answer, err := lua.LockForce.Run(ctx, s.rdb, []string{s.inSlotWith(key, string(c.receipt)), key},
		decimal(c.serial), receiptMS, s.publish()).Text()
	if err == nil && answer != answerReleased && answer != answerFree {
		err = fmt.Errorf("unknown answer %q", answer)
	}
	return answer == answerReleased, err
}

// publish is the command that announces a release. In a cluster Redisson listens to sharded
// channels, whose messages stay on the node of the lock.
func (s scripts) publish() string {
	if s.clustered {
		return "spublish"
	}
	return "publish"
}

// kept says whether Redis writes locks to its append-only file and to its replicas.
func (s scripts) kept() string {
	if s.vanishing {
		return "vanishing"
	}
	return "kept"
}

func decimal(n uint64) string { return strconv.FormatUint(n, 10) }

// parseAnswers passes each answer to f. It fails on words that f refuses and that do not mean that
// a lock was lost: the script's header does not list them.
func parseAnswers(cmd *redis.Cmd, keys int, f func(i int, answer string) bool) error {
	answers, err := cmd.StringSlice()
	if err != nil {
		return err
	}
	if len(answers) != keys {
		return fmt.Errorf("%d answers for %d keys", len(answers), keys)
	}
	for i, answer := range answers {
		if !f(i, answer) && answer != answerLost {
			return fmt.Errorf("unknown answer %q", answer)
		}
	}
	return nil
}

// inSlotWith puts the name of one of the Locker's own keys into the slot of a lock.
func (s scripts) inSlotWith(lock, name string) string {
	if s.clustered && hashTag(s.prefix) == s.prefix {
		return name + ":{" + hashTag(lock) + "}"
	}
	return name
}

// slot names the keys that one script call, or one listener, may name.
func (s scripts) slot(key string) string {
	if s.clustered {
		return hashTag(key)
	}
	return ""
}

// node names the node of a lock, as far as the client knows it.
func (s scripts) node(ctx context.Context, key string) string {
	if cluster, ok := s.rdb.(*redis.ClusterClient); ok {
		if node, err := cluster.MasterForKey(ctx, key); err == nil {
			return node.Options().Addr
		}
	}
	return ""
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

const channelPrefix = "redisson_lock__channel:"

// releaseChannel names the channel that announces a release, as Redisson does.
func releaseChannel(key string) string {
	if strings.Contains(key, "{") {
		return channelPrefix + key
	}
	return channelPrefix + "{" + key + "}"
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

// scriptCall identifies one script call and its repeats. Serials grow with each call of a Locker, and two
// calls that are in progress never share a receipt.
type scriptCall struct {
	receipt receiptKey
	serial  uint64
}

// receiptKey is the name of a key in which Redis keeps the last call and its answer, without a hash
// tag for clusters.
type receiptKey string

// calls identifies the script calls of a Locker, and releases what abandoned calls took. Callers of
// methods whose comment does not say otherwise hold mu.
type calls struct {
	*lifetime
	scripts
	id     string // unique among all processes
	serial uint64
	// unused receipts are reused, the last used first.
	unused []receiptKey
	made   int
	// abandoned calls are released in the background, the first of them next.
	abandoned []abandonedCall
	releasing bool // a goroutine runs releaseAbandoned
}

func (c *calls) next() scriptCall {
	if n := len(c.unused); n > 0 {
		last := c.unused[n-1]
		c.unused = c.unused[:n-1]
		return c.nextOn(last)
	}
	c.made++
	return c.nextOn(receiptKey(c.prefix + ":receipt:" + c.id + ":" + strconv.Itoa(c.made)))
}

// nextOn returns a call that overwrites the receipt of an earlier one.
func (c *calls) nextOn(receipt receiptKey) scriptCall {
	c.serial++
	return scriptCall{receipt, c.serial}
}

// acquire returns a call that takes locks, with an owner name that is unique among all processes.
func (c *calls) acquire() *grant {
	call := c.next()
	return &grant{owner: c.id + ":" + decimal(call.serial), acquireCall: call}
}

// release returns the call that releases locks of a grant.
func (c *calls) release(g *grant) scriptCall {
	if g.receiptMoved {
		return c.next()
	}
	g.receiptMoved = true
	return c.nextOn(g.acquireCall.receipt)
}

// done lets other calls use the receipt.
func (c *calls) done(call scriptCall) { c.unused = append(c.unused, call.receipt) }

const (
	// abandonedRetryMin is how long an abandoned call is retried at least.
	abandonedRetryMin = 30 * time.Second
	// abandonedMax bounds the queue. In a large outage the oldest calls are dropped, and their
	// locks end with their leases.
	abandonedMax = 16_384
	// abandonedParallel is how many are retried at the same time.
	abandonedParallel = 8
)

// abandonedCall is a script call without a caller that waits for its answer. It may have taken
// locks, or may still take them. Releasing its locks frees what was taken, and a late repeat is
// then rejected.
type abandonedCall struct {
	call  scriptCall
	owner string
	keys  []string
	until time.Time // it is retried
}

// abandon queues a call, which is released in the background as soon as Redis can be reached. It is
// retried for the length of its lease, at least for abandonedRetryMin, and once more when the Locker
// is closed.
func (c *calls) abandon(lease time.Duration, a abandonedCall) {
	a.until = time.Now().Add(max(lease, abandonedRetryMin))
	c.abandoned = append(c.abandoned, a)
	if over := len(c.abandoned) - abandonedMax; over > 0 {
		c.abandoned = c.abandoned[over:]
	}
	if !c.releasing && !c.closed {
		c.releasing = true
		c.tasks.Go(c.releaseAbandoned)
	}
}

// releaseAbandoned runs until the queue is empty or the Locker is closed. It locks mu.
func (c *calls) releaseAbandoned() {
	wait := outagePause
	for {
		failed, left := c.releaseAbandonedRound(c.running)
		switch {
		case left == 0:
			return
		case failed == 0:
			wait = outagePause
			continue
		}
		if pause(c.running, wait, nil) != nil {
			return
		}
		wait = min(2*wait, outagePauseMax)
	}
}

// releaseAbandonedRound tries the oldest calls once, in parallel. Failed ones go to the end of the
// queue, so that a node that is away does not delay the others. It locks mu.
func (c *calls) releaseAbandonedRound(ctx context.Context) (failed, left int) {
	c.mu.Lock()
	n := min(abandonedParallel, len(c.abandoned))
	round := slices.Clone(c.abandoned[:n])
	c.abandoned = c.abandoned[n:]
	c.mu.Unlock()

	released := make([]bool, n)
	inParallel(n, n, func(i int) {
		limited, cancel := context.WithTimeout(ctx, undoTimeout)
		defer cancel()
		_, err := c.sendRelease(limited, round[i].call, round[i].owner, round[i].keys)
		released[i] = err == nil || rejected(err)
	})

	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	for i, a := range round {
		switch {
		case released[i]:
			c.done(a.call)
		case now.Before(a.until):
			failed++
			c.abandoned = append(c.abandoned, a)
		}
	}
	c.releasing = c.releasing && len(c.abandoned) > 0
	return failed, len(c.abandoned)
}

// releaseAbandonedOnce tries each call once more when the Locker is closed. It locks mu.
func (c *calls) releaseAbandonedOnce(ctx context.Context) {
	c.mu.Lock()
	rounds := (len(c.abandoned) + abandonedParallel - 1) / abandonedParallel
	c.mu.Unlock()
	for range rounds {
		if ctx.Err() != nil {
			return
		}
		c.releaseAbandonedRound(ctx)
	}
}
