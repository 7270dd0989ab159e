// Package crashpoint lets a test kill a process at a named point in the code: the process sends itself
// SIGKILL there. An environment variable sets the point and at which pass it takes effect:
// STAMPEDE_CRASH_AT=after-commit or after-commit:3. With STAMPEDE_FREEZE_AT the process freezes itself
// by SIGSTOP instead, until the test thaws it.
package crashpoint

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
)

// The points, in the order in which an order passes them.
const (
	// BeforePersist: a batch was read and is not in Postgres yet.
	BeforePersist = "before-persist"
	// AfterCommit: its transaction is committed but not announced.
	AfterCommit = "after-commit"
	// BeforeAck: everything is done except the ack.
	BeforeAck = "before-ack"

	// BeforeExpire: overdue orders are locked; nothing is written.
	BeforeExpire = "before-expire"
	// BeforeExpireCommit: their expiry is written but not committed.
	BeforeExpireCommit = "before-expire-commit"
	// AfterExpire: it is committed; their units are not released in Redis.
	AfterExpire = "after-expire"
	// BeforeRelease: releases are deleted from their table, uncommitted; Redis is unchanged.
	BeforeRelease = "before-release"
	// AfterRelease: Redis has released the units; the deletion is uncommitted.
	AfterRelease = "after-release"
	// AfterReleaseCommit: the deletion is committed.
	AfterReleaseCommit = "after-release-commit"

	// BeforePayment: the order of reported money is locked; nothing is written.
	BeforePayment = "before-payment"
	// PaymentInserted: the payment is written; its order is not changed.
	PaymentInserted = "payment-inserted"
	// BeforePaymentCommit: both are written but not committed.
	BeforePaymentCommit = "before-payment-commit"
	// AfterPayment: they are committed but not announced or answered.
	AfterPayment = "after-payment"

	// RebuildBegun: a rebuild has its lock and has identified the Redis server.
	RebuildBegun = "rebuild-begun"
	// RebuildDistrusted: the partition does not sell any more.
	RebuildDistrusted = "rebuild-distrusted"
	// RebuildClosed: the sales are closed in Redis.
	RebuildClosed = "rebuild-closed"
	// RebuildDrained: the entries of the stream are in Postgres.
	RebuildDrained = "rebuild-drained"
	// RebuildRaised: the next epoch of a sale has begun in Postgres.
	RebuildRaised = "rebuild-raised"
	// RebuildStaging: some of its buyers are copied to Redis.
	RebuildStaging = "rebuild-staging"
	// RebuildStaged: all of them are copied; the sale is still closed.
	RebuildStaged = "rebuild-staged"
	// RebuildOpened: the sale is open, once its server is verified.
	RebuildOpened = "rebuild-opened"
	// RebuildPublished: Postgres has recorded that too.
	RebuildPublished = "rebuild-published"
	// RebuildServerSaved: the server is recorded in Postgres but not yet marked in Redis.
	RebuildServerSaved = "rebuild-server-saved"
	// RebuildVerified: the server is verified; ended sales are still closed.
	RebuildVerified = "rebuild-verified"

	// UnitsGiven: a shard of a sale has given units, which are on their way.
	UnitsGiven = "units-given"
	// LoweringAsked: a shard has removed units from its stock; others have not been asked.
	LoweringAsked = "lowering-asked"
	// LoweringRefused: Postgres has the refusal; the shards have not put back the units.
	LoweringRefused = "lowering-refused"

	// SaleRetired: Postgres has retired a sale; Redis has its buyers.
	SaleRetired = "sale-retired"
	// ShardRetired: a shard has no buyers any more; others may have some.
	ShardRetired = "shard-retired"

	// ArchiveWritten: the file of an archived sale is on disk under a temporary name.
	ArchiveWritten = "archive-written"
	// ArchiveNamed: it has its name, and nothing is deleted.
	ArchiveNamed = "archive-named"
	// ArchiveMarked: Postgres has recorded that the sale is in the file.
	ArchiveMarked = "archive-marked"
	// ArchiveRemembered: it remembers the payments of the sale.
	ArchiveRemembered = "archive-remembered"
	// ArchiveDeleting: some of its orders are deleted.
	ArchiveDeleting = "archive-deleting"
	// ArchiveDeleted: all of them are; Redis has the end of the sale.
	ArchiveDeleted = "archive-deleted"
	// ArchiveRestoring: the orders of a sale are back, uncommitted.
	ArchiveRestoring = "archive-restoring"

	// ProjectionsWithdrawn: a rebuild of the projections has locked the wrong rows of a month.
	ProjectionsWithdrawn = "projections-withdrawn"
	// ProjectionsReplaced: they are replaced but not committed.
	ProjectionsReplaced = "projections-replaced"

	// DrawPortion: a part of the entries of a draw is in its list.
	DrawPortion = "draw-portion"
	// DrawFrozen: the list is frozen, uncommitted.
	DrawFrozen = "draw-frozen"
	// DrawListed: the list is frozen and committed; its time is not read.
	DrawListed = "draw-listed"
	// DrawSeeded: the draw has its seed, uncommitted.
	DrawSeeded = "draw-seeded"
	// DrawRanked: the entries are ranked, uncommitted.
	DrawRanked = "draw-ranked"
	// BeforeOffer: the next ranks of a draw are locked; nothing is reserved for them.
	BeforeOffer = "before-offer"
	// AfterOffer: their units are reserved in Redis; nothing is recorded.
	AfterOffer = "after-offer"
	// BeforeOfferCommit: what became of them is recorded but not committed.
	BeforeOfferCommit = "before-offer-commit"

	// BeforeRelayMove: a target has events, and its position is not moved.
	BeforeRelayMove = "before-relay-move"
	// AfterRelayMove: the position is moved.
	AfterRelayMove = "after-relay-move"
)

const (
	// Env is the variable that arms a point.
	Env = "STAMPEDE_CRASH_AT"
	// FreezeEnv arms a point at which the process is frozen.
	FreezeEnv = "STAMPEDE_FREEZE_AT"
)

var names = []string{
	BeforePersist, AfterCommit, BeforeAck,
	BeforeExpire, BeforeExpireCommit, AfterExpire, BeforeRelease, AfterRelease, AfterReleaseCommit,
	BeforePayment, PaymentInserted, BeforePaymentCommit, AfterPayment,
	RebuildBegun, RebuildDistrusted, RebuildClosed, RebuildDrained, RebuildRaised, RebuildStaging, RebuildStaged,
	RebuildOpened, RebuildPublished, RebuildServerSaved, RebuildVerified,
	UnitsGiven, LoweringAsked, LoweringRefused,
	SaleRetired, ShardRetired,
	ArchiveWritten, ArchiveNamed, ArchiveMarked, ArchiveRemembered, ArchiveDeleting, ArchiveDeleted, ArchiveRestoring,
	ProjectionsWithdrawn, ProjectionsReplaced,
	DrawPortion, DrawFrozen, DrawListed, DrawSeeded, DrawRanked, BeforeOffer, AfterOffer, BeforeOfferCommit,
	BeforeRelayMove, AfterRelayMove,
}

// These are nil except in crash tests. They are set once, before main.
var (
	armed, armErr       = parse(Env)
	freezing, freezeErr = parse(FreezeEnv)
)

type point struct {
	name string
	// left counts the remaining passes; the one that makes it 0 takes effect.
	left atomic.Int64
}

// Hit kills or freezes the process if this is the armed point and pass. It costs two loads if nothing
// is armed.
func Hit(name string) {
	if freezing.reached(name) {
		continued := make(chan os.Signal, 1)
		signal.Notify(continued, syscall.SIGCONT)
		fmt.Fprintln(os.Stderr, "frozen at "+name)
		_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
		<-continued // the signal may be delayed; nothing more may happen before
		signal.Stop(continued)
	}
	if armed.reached(name) {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // the signal may be delayed; nothing more may happen
	}
}

func (p *point) reached(name string) bool {
	return p != nil && p.name == name && p.left.Add(-1) == 0
}

// Check returns an error for a setting that names no point: without a crash a crash test would test
// nothing.
func Check() error { return errors.Join(armErr, freezeErr) }

func parse(variable string) (*point, error) {
	setting := os.Getenv(variable)
	if setting == "" {
		return nil, nil
	}
	name, pass, counted := strings.Cut(setting, ":")
	n := int64(1)
	if counted {
		var err error
		if n, err = strconv.ParseInt(pass, 10, 64); err != nil || n < 1 {
			return nil, fmt.Errorf("%s=%q: the pass must be a whole number from 1", variable, setting)
		}
	}
	if !slices.Contains(names, name) {
		return nil, fmt.Errorf("%s=%q: the points are %s", variable, setting, strings.Join(names, ", "))
	}
	p := &point{name: name}
	p.left.Store(n)
	return p, nil
}
