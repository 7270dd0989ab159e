package testshop

import (
	"context"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/draw"
	"stampede/internal/clocks"
	"stampede/internal/pg"
)

// A round of drand quicknet, of the past, with its signature.
const (
	BeaconRound     = 657413
	BeaconSignature = "b713718a38ae728dfd477991af2822e08d2f305e47718cef9f7848ce4050e7be" +
		"41076862b98fad56e91a6b85b89cd97b"
)

// Clocks are those of a draw in Postgres alone.
func Clocks(ctx context.Context, on pg.Querier) (clocks.Times, error) {
	r, err := pg.ReadClock(ctx, on)
	if err != nil {
		return clocks.Times{}, err
	}
	return clocks.Agree(r)
}

// MoveDrawToRound moves a frozen draw to the time of that round, and what was published of it.
func MoveDrawToRound(t testing.TB, pool *pgxpool.Pool, goods uuid.UUID) {
	t.Helper()
	at := draw.RoundTime(BeaconRound)
	Exec(t, pool, `WITH entries AS (UPDATE sales SET closes_at = $2 FROM draws WHERE id = entries_id AND draws.sale_id = $1),
		published AS (UPDATE sale_events SET data = data || jsonb_build_object('closes_at', $2::timestamptz,
			'frozen_at', $3::timestamptz, 'rounds', ARRAY[$4::bigint]) WHERE sale_id = $1 AND type = 'DrawFrozen')
		UPDATE draws SET frozen_at = $3, round = $4 WHERE sale_id = $1`,
		goods, at.Add(-time.Minute), at.Add(-time.Second), BeaconRound)
}
