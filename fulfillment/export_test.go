package fulfillment

import (
	"context"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"

	"stampede/reservation"
)

const RemedyRebuild = remedyRebuild

func (x *AuditReport) Promise(name string) *Promise { return x.promise(name) }

var SaleFields = saleFields

const RemedyProjections = remedyProjections

const RemedyOperator = remedyOperator

const EquationsShown = equationsShown

const FindingsShown = findingsShown

type BatcherConfig = batcherConfig

func (x *Ledger) Waiting(d time.Duration) *Ledger { return x.waiting(d) }

var IsLocked = isLocked

const RecordTimeout = recordTimeout

type Submission = submission

type Pace = pace

const LingerMax = lingerMax

type Batcher = batcher

var NewWorkerMetrics = newWorkerMetrics

var NewBatcher = newBatcher

const BadData = badData

var FaultOf = faultOf

var ErrPanicked = errPanicked

type InFlightBatch = inFlightBatch

var LockLease = lockLease

const EndedSession = endedSession

type Blockers = blockers

type BlockerKey = blockerKey

type BlockerSeen = blockerSeen

const SilentBetweenQueryMax = silentBetweenQueryMax

const NamedSession = namedSession

var EncodeFields = encodeFields

var DecodeFields = decodeFields

const FieldReplayOf = fieldReplayOf

var ErrRefused = errRefused

var ReservedOf = reservedOf

const SetAside = setAside

var SweepSales = sweepSales

var NewExpirer = newExpirer

func (x *Ledger) ReleaseSome(ctx context.Context, store *reservation.Store, except []uuid.UUID) (sale uuid.UUID, released int, err error) {
	return x.releaseSome(ctx, store, except)
}

const SweepMax = sweepMax

var LockOverdue = lockOverdue

var LockOrder = lockOrder

var NeededGuards = neededGuards

const Transient = transient

func (x Heartbeat) Send(ctx context.Context) (lasted time.Duration, err error) { return x.send(ctx) }

const Oversold = oversold

func (x *Outcomes) Published() prometheus.Counter { return x.published }

func (x *Outcomes) Dropped() prometheus.Counter { return x.dropped }

func (x *Outcomes) Tell(outcomes []reservation.OrderOutcome) { x.tell(outcomes) }

const OutcomesTogether = outcomesTogether

const OutcomesQueued = outcomesQueued

const OutcomesKept = outcomesKept

func (x *Outcomes) Publish(ctx context.Context, outcomes []reservation.OrderOutcome) {
	x.publish(ctx, outcomes)
}

var NumberOf = numberOf

func (x *Rebuilder) Needs(ctx context.Context, partitions int, withEnded bool) ([]need, error) {
	return x.needs(ctx, partitions, withEnded)
}

const RebuildWaits = rebuildWaits

const RebuildFailed = rebuildFailed

const RebuildingPart = rebuildingPart

func (x *Rebuilder) Begin(ctx context.Context) (*rebuildSession, error) { return x.begin(ctx) }

const OtherRebuilds = otherRebuilds

const HoldersPerCall = holdersPerCall

func (x *Rebuilder) FindSale(ctx context.Context, id uuid.UUID) (guardedSale, error) {
	return x.findSale(ctx, id)
}

func (x *Rebuilder) NewBuild(s *rebuildSession, n need) *build { return x.newBuild(s, n) }

type Need = need

type GuardedSale = guardedSale

var ErrOvertaken = errOvertaken

var ColumnsOf = columnsOf

type RebuildSession = rebuildSession

func (x *Rebuilder) PartitionIn(ctx context.Context, s *rebuildSession, partition int, reason string) (RebuildReport, error) {
	return x.partition(ctx, s, partition, reason)
}

func (x *Rebuilder) SaleIn(ctx context.Context, s *rebuildSession, id uuid.UUID, reason string) (RebuildReport, error) {
	return x.sale(ctx, s, id, reason)
}

type Build = build

const RefusedAgain = refusedAgain

var ReasonsOfProofs = reasonsOfProofs

func (x *Rebuilder) Heal(ctx context.Context, partitions int, withEnded bool) (tried bool, err error) {
	return x.heal(ctx, partitions, withEnded)
}

const RemedyWorker = remedyWorker

var OrderOf = orderOf

const RemedyForget = remedyForget

const RemedyAppend = remedyAppend

const RepairsPerTurn = repairsPerTurn

func (x *Ledger) PendingReleases(ctx context.Context) (pending int, err error) {
	return x.pendingReleases(ctx)
}

const ReleasesCounted = releasesCounted

var WriteChange = writeChange

var ErrNotLocked = errNotLocked
