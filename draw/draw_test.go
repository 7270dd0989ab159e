package draw_test

import (
	"crypto/sha256"
	"encoding/binary"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"golang.org/x/mod/sumdb/tlog"

	"stampede/draw"
	"stampede/reservation/order"
)

// stored are the nodes of a tree, as package tlog wants them.
type stored []tlog.Hash

func (s stored) ReadHashes(indexes []int64) (hashes []tlog.Hash, err error) {
	for _, i := range indexes {
		hashes = append(hashes, s[i])
	}
	return hashes, nil
}

func (s *stored) add(t *testing.T, n int64, leaf tlog.Hash) {
	t.Helper()
	added, err := tlog.StoredHashesForRecordHash(n, leaf, *s)
	require.NoError(t, err)
	*s = append(*s, added...)
}

// someLeaf is a leaf that differs for each place.
func someLeaf(place int64) tlog.Hash {
	return sha256.Sum256(binary.BigEndian.AppendUint64(nil, uint64(place)))
}

func TestRootIsThatOfRFC6962(t *testing.T) {
	t.Parallel()
	var tree draw.Tree
	var nodes stored
	sizes := map[int64]bool{}
	for range 20 {
		sizes[rand.Int64N(100_000)] = true
	}
	for size := range int64(100_000) {
		if size <= 2_100 || sizes[size] {
			want, err := tlog.TreeHash(size, nodes)
			require.NoError(t, err)
			require.Equal(t, want, tree.Root(), "of %d leaves", size)
		}
		tree.Add(someLeaf(size))
		nodes.add(t, size, someLeaf(size))
	}
}

func TestProofFromChunksIsThatOfTheTree(t *testing.T) {
	t.Parallel()
	for _, size := range []int64{
		1, 2, 3, 1023, 1024, 1025, 2047, 2048, 2049, 3072, 5121, 1 + rand.Int64N(20_000),
	} {
		var nodes stored
		var leaves, chunks []draw.Hash
		for place := range size {
			nodes.add(t, place, someLeaf(place))
			leaves = append(leaves, someLeaf(place))
		}
		chunk := func(n int64) []draw.Hash {
			return leaves[n*draw.ChunkLeaves : min((n+1)*draw.ChunkLeaves, size)]
		}
		for n := range (size + draw.ChunkLeaves - 1) / draw.ChunkLeaves {
			chunks = append(chunks, draw.RootOf(chunk(n)))
		}
		root := draw.RootOf(chunks)
		require.Equal(t, draw.RootOf(leaves), root, "of the roots of %d leaves", size)
		for _, place := range []int64{0, size / 2, size - 1, rand.Int64N(size), rand.Int64N(size)} {
			proof, err := draw.Prove(chunks, chunk(place/draw.ChunkLeaves), place)
			require.NoError(t, err)
			want, err := tlog.ProveRecord(size, place, nodes)
			require.NoError(t, err)
			require.Equal(t, want, proof, "place %d of %d", place, size)
			require.NoError(t, tlog.CheckRecord(proof, size, root, place, leaves[place]))
			require.Error(t, tlog.CheckRecord(proof, size, root, place, someLeaf(-1)))
		}
		for _, place := range []int64{-1, size, size + draw.ChunkLeaves, 1 << 62} {
			_, err := draw.Prove(chunks, chunk(0), place)
			require.Error(t, err, "place %d of %d", place, size)
		}
		changed := append([]draw.Hash{someLeaf(-1)}, chunk(0)[1:]...)
		_, err := draw.Prove(chunks, changed, 0)
		require.ErrorContains(t, err, "are not chunk 0")
	}
}

// someEntry is an entry that differs for each number.
func someEntry(n int64, lines order.Lines) order.Receipt {
	leaf := someLeaf(n)
	id := uuid.UUID(leaf[:16])
	return order.Receipt{
		OrderID: id, SaleID: entriesSale, User: "user-" + id.String()[:8], Epoch: 1, Sequence: n + 1, Quantity: 1,
		Lines: lines, ReservedAt: time.UnixMilli(1_795_000_000_000 + n).UTC(),
	}
}

var entriesSale = uuid.MustParse("01a1fd78-7a47-79f0-861a-d13e99809a15")

func record(t testing.TB, entry order.Receipt) draw.Record {
	t.Helper()
	r, err := draw.NewRecord(entry)
	require.NoError(t, err)
	return r
}

func TestRecordIsThatOfTheReceiptUnderAnySecret(t *testing.T) {
	t.Parallel()
	for _, lines := range []order.Lines{"", "c1"} {
		entry := someEntry(7, lines)
		for _, secret := range []string{"s", "t"} {
			signer, err := order.NewSigner([]byte(strings.Repeat(secret, order.MinReceiptSecretBytes)))
			require.NoError(t, err)
			read, err := order.ParseReceipt(string(signer.Sign(nil, entry)))
			require.NoError(t, err)
			require.Equal(t, entry, read)
			require.Equal(t, record(t, entry), record(t, read))
		}
		other := entry
		other.OrderID[15]++
		require.NotEqual(t, record(t, entry), record(t, other))
		r := record(t, entry)
		require.Equal(t, tlog.RecordHash(r[:]), r.Leaf())
		require.Equal(t, (lines + "\x00")[0], r[0])
	}
}

func TestEntryIsOneUnit(t *testing.T) {
	t.Parallel()
	for lines, units := range map[order.Lines]int64{"": 2, "a2": 2, "a2c1": 3, "a1c1": 1, "a2c": 1, "1": 1, "%1": 1} {
		entry := someEntry(1, lines)
		entry.Quantity = units
		_, err := draw.NewRecord(entry)
		require.ErrorIs(t, err, draw.ErrNoEntry, lines)
	}
}
