package rebuild

import (
	"context"

	"github.com/google/uuid"

	"stampede/internal/pg"
	"stampede/reservation"
)

const (
	HoldersPerCall = holdersPerCall
	RebuildsMax    = rebuildsMax

	LogBegunPartition = logBegunPartition
	LogFailed         = logFailed
	LogOtherRebuild   = logOtherRebuild
	LogProofAgain     = logProofAgain
	LogWaiting        = logWaiting
)

var (
	ErrOvertaken    = errOvertaken
	ReasonsOfProofs = reasonsOfProofs
)

type (
	Build        = build
	Session      = lockSession
	RequiredSale = requiredSale
)

func (r *Rebuilder) Begin(ctx context.Context, partition int) (*Session, error) {
	return r.begin(ctx, partition)
}

func (r *Rebuilder) FindSale(ctx context.Context, id uuid.UUID) (RequiredSale, error) {
	return r.findSale(ctx, id)
}

func (r *Rebuilder) NewBuild(s *Session, n Need) *Build { return r.newBuild(s, n) }

func (r *Rebuilder) PartitionIn(ctx context.Context, s *Session, partition int, reason string) (Report, error) {
	return r.partition(ctx, s, partition, reason)
}

func (r *Rebuilder) SaleIn(ctx context.Context, s *Session, id uuid.UUID, reason string) (Report, error) {
	return r.sale(ctx, s, Need{Sale: id, Reason: reason}, 0)
}

func NewSession(conn pg.Session) *Session { return &lockSession{conn, func() {}} }

func (s *lockSession) Conn() pg.Session { return s.conn }

func (s *lockSession) End() { s.end() }

func (s *lockSession) Exec(ctx context.Context, query string, args ...any) error {
	return s.exec(ctx, query, args...)
}

func (s *lockSession) RaiseEpoch(ctx context.Context, sale RequiredSale, reason string) (raisedSale, error) {
	return s.raiseEpoch(ctx, sale, reason, 0)
}

func (s requiredSale) Closed() reservation.ClosedSale { return s.closed[0] }

func (b *build) Token() string { return b.token }

func (b *build) Inspect(ctx context.Context) (reservation.ServerState, error) {
	return b.inspect(ctx, b.partition)
}

func (b *build) Distrust(ctx context.Context) error { return b.distrust(ctx) }

// CloseSale closes a sale with one shard, and stores in it what Redis knew of it.
func (b *build) CloseSale(ctx context.Context, sale *RequiredSale) error {
	return b.closeIn(ctx, sale, sale.layout.Home)
}

func (b *build) CloseAndDrain(ctx context.Context, sales []RequiredSale) error {
	return b.closeAndDrain(ctx, sales, b.partition)
}

func (b *build) StageBuyers(ctx context.Context, sale raisedSale) (staged, error) {
	shards, err := b.stageBuyers(ctx, sale)
	return addUp(shards), err
}

func (s staged) Orders() int64 { return s.orders }

func (s staged) Units() int64 { return s.units }

func (b *build) Open(ctx context.Context, sale raisedSale, left int64, all staged) error {
	return b.openSale(ctx, sale, left, nil, []staged{all})
}

func (b *build) RebuildSales(ctx context.Context, sales []RequiredSale) error {
	return b.rebuildSales(ctx, sales)
}

func (b *build) MarkVerified(ctx context.Context, server reservation.ServerState) error {
	return b.markVerified(ctx, server)
}
