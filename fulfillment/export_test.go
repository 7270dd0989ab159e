package fulfillment

import (
	"context"

	"github.com/google/uuid"
)

const RemedyRebuild = remedyRebuild

func (x *AuditReport) Promise(name string) *Promise { return x.promise(name) }

var SaleFields = saleFields

const RemedyProjections = remedyProjections

const RemedyOperator = remedyOperator

const EquationsShown = equationsShown

const FindingsShown = findingsShown

type BatcherConfig = batcherConfig

type Submission = submission

type Pace = pace

const LingerMax = lingerMax

type Batcher = batcher

var NewBatcher = newBatcher

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

var ReservedOf = reservedOf

var NeededGuards = neededGuards

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
