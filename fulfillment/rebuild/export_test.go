package rebuild

import (
	"context"

	"github.com/google/uuid"
)

var NumberOf = numberOf

const RebuildWaits = rebuildWaits

const RebuildFailed = rebuildFailed

const RebuildingPart = rebuildingPart

func (x *Rebuilder) Begin(ctx context.Context) (*Session, error) { return x.begin(ctx) }

const OtherRebuilds = otherRebuilds

const HoldersPerCall = holdersPerCall

func (x *Rebuilder) FindSale(ctx context.Context, id uuid.UUID) (guardedSale, error) {
	return x.findSale(ctx, id)
}

func (x *Rebuilder) NewBuild(s *Session, n Need) *build { return x.newBuild(s, n) }

type GuardedSale = guardedSale

var ErrOvertaken = errOvertaken

type RebuildSession = Session

func (x *Rebuilder) PartitionIn(ctx context.Context, s *Session, partition int, reason string) (Report, error) {
	return x.partition(ctx, s, partition, reason)
}

func (x *Rebuilder) SaleIn(ctx context.Context, s *Session, id uuid.UUID, reason string) (Report, error) {
	return x.sale(ctx, s, id, reason)
}

type Build = build

const RefusedAgain = refusedAgain

var ReasonsOfProofs = reasonsOfProofs
