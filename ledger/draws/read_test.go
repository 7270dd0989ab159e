package draws_test

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A crowd of entrants that ask for their proofs has the hashes of the chunks read once.
func TestProofsShareHashes(t *testing.T) {
	t.Parallel()
	d := newDraw(t, 1500)
	d.prepare(t)
	entries := d.receipts(t)
	first, err := d.Proof(t.Context(), d.goods, entries[0])
	require.NoError(t, err)
	d.exec(t, "DELETE FROM draw_chunks WHERE sale_id = $1 AND chunk = 1", d.goods)
	again, err := d.Proof(t.Context(), d.goods, entries[0])
	require.NoError(t, err)
	require.Equal(t, first, again)
}
