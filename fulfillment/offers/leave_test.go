package offers_test

import (
	"context"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/ledger/draws"
	"stampede/reservation/order"
)

// An entry that is cancelled just when the entries close is either not in the list or cancelled after the end. An
// entrant cannot do so after the end, and an operator can.
func TestEntryIsCancelledAtTheEnd(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		cancel func(context.Context, *ledger.Ledger, uuid.UUID) error
		want   error
	}{
		"by its entrant": {func(ctx context.Context, l *ledger.Ledger, id uuid.UUID) error {
			_, err := l.Cancel(ctx, id, user(0))
			return err
		}, order.ErrIllegalTransition},
		"by an operator": {func(ctx context.Context, l *ledger.Ledger, id uuid.UUID) error {
			_, err := l.Withdraw(ctx, id, "a mistake", "ada")
			return err
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			s := testshop.OnOwnRedis(t, 1)
			d := newDraw(t, s, 2, 1)
			testwork.Fulfil(t, s)
			close := "UPDATE sales SET closes_at = clock_timestamp() + make_interval(secs => $2) WHERE id = $1"
			require.NoError(t, s.Exec(t, close, d.entries, 3600))
			held := s.HoldSale(t, d.entries)
			done := make(chan error, 1)
			go func() { done <- c.cancel(ctx, ledger.New(s.Pool), d.receipts[user(0)].OrderID) }()
			s.AwaitWaiting(t, 1)
			_, err := held.Exec(ctx, close, d.entries, 0) // after the change of the order began
			require.NoError(t, err)
			require.NoError(t, held.Commit(ctx))
			require.ErrorIs(t, <-done, c.want)

			testwork.ReleaseUnits(t, s)
			o := offerer(t, s)
			require.NoError(t, o.Prepare(ctx))
			d.seed(t)
			require.NoError(t, o.Prepare(ctx))
			require.Equal(t, int64(2), d.find(t).Entries, "the entry was live at the end")
			for offer(t, o) > 0 {
			}
			require.Contains(t, []draws.State{draws.Offering, draws.Over}, d.find(t).State)
			d.requireUnbroken(t)
		})
	}
}
