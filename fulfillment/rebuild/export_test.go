package rebuild

import (
	"context"

	"github.com/google/uuid"
)

var NumberOf = numberOf

const LogWaiting = logWaiting

const LogFailed = logFailed

const LogBegunPartition = logBegunPartition

func (x *Rebuilder) Begin(ctx context.Context) (*Session, error) { return x.begin(ctx) }

const LogOtherRebuild = logOtherRebuild

const HoldersPerCall = holdersPerCall

func (x *Rebuilder) FindSale(ctx context.Context, id uuid.UUID) (requiredSale, error) {
	return x.findSale(ctx, id)
}

func (x *Rebuilder) NewBuild(s *Session, n Need) *build { return x.newBuild(s, n) }

type RequiredSale = requiredSale

var ErrOvertaken = errOvertaken

func (x *Rebuilder) PartitionIn(ctx context.Context, s *Session, partition int, reason string) (Report, error) {
	return x.partition(ctx, s, partition, reason)
}

func (x *Rebuilder) SaleIn(ctx context.Context, s *Session, id uuid.UUID, reason string) (Report, error) {
	return x.sale(ctx, s, id, reason)
}

type Build = build

const LogProofAgain = logProofAgain

var ReasonsOfProofs = reasonsOfProofs
