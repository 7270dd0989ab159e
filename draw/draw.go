// Package draw is the part of a draw that anyone can compute: the list of the entries and its root, the seed, the rank
// of each entry, and the verification of all that from two public files. It needs no server.
//
// A list is frozen, and its root published, before its seed exists. The rank of an entry then follows from the root's
// list and the seed alone, so nobody chooses who wins: neither an entrant nor the server.
package draw

import (
	"crypto/sha256"
	"errors"
	"fmt"

	"golang.org/x/mod/sumdb/tlog"

	"stampede/reservation/order"
)

// MaxEntries is the most entries of a draw.
const MaxEntries = order.MaxStock

// RecordBytes is the length of a record. A list of entries, as a file, is their records by place, and nothing else.
const RecordBytes = 1 + sha256.Size

// Record is an entry in the list: the letter of its item, or 0 in a sale without items, and the SHA-256 of the body of
// its receipt. The random id of the order in the body hides the user. A receipt that is signed anew has the same body.
type Record [RecordBytes]byte

// ErrNoEntry is returned for an order that is not one unit of one item.
var ErrNoEntry = errors.New("an entry is an order of one unit")

// NewRecord returns the record of an entry.
func NewRecord(entry order.Receipt) (r Record, err error) {
	if entry.Quantity != 1 {
		return r, ErrNoEntry
	}
	if entry.Lines != "" {
		if lines, err := order.ParseLines(string(entry.Lines)); err != nil || lines.Units() != 1 {
			return r, ErrNoEntry
		}
		r[0] = entry.Lines[0]
	}
	body := sha256.Sum256(entry.AppendBody(make([]byte, 0, 512)))
	copy(r[1:], body[:])
	return r, nil
}

// Hash is a node of the tree over the list.
type Hash = tlog.Hash

// Leaf is the leaf of the record in the tree of RFC 6962: tlog.RecordHash without its allocations.
func (r Record) Leaf() Hash {
	var prefixed [1 + RecordBytes]byte
	copy(prefixed[1:], r[:])
	return sha256.Sum256(prefixed[:])
}

// treeLevels is enough for a million million leaves.
const treeLevels = 40

// Tree computes the root of a list, by RFC 6962, while it is read. The zero value is the empty tree.
type Tree struct {
	size int64
	// full has, where bit i of size is set, the root of a full subtree of 2^i leaves. A greater i is further left.
	full [treeLevels]Hash
}

// Add appends a leaf.
func (t *Tree) Add(leaf Hash) {
	level := 0
	for ; t.size>>level&1 == 1; level++ {
		leaf = tlog.NodeHash(t.full[level], leaf)
	}
	t.full[level] = leaf
	t.size++
}

// Root is the root of the leaves so far: tlog.TreeHash.
func (t *Tree) Root() Hash {
	root, found := Hash(sha256.Sum256(nil)), false
	for level, full := range t.full {
		switch {
		case t.size>>level&1 == 0:
		case found:
			root = tlog.NodeHash(full, root)
		default:
			root, found = full, true
		}
	}
	return root
}

// RootOf is the root of leaves, or of the roots of the chunks of a list.
func RootOf(leaves []Hash) Hash {
	var t Tree
	for _, leaf := range leaves {
		t.Add(leaf)
	}
	return t.Root()
}

// ChunkLeaves is how many leaves a chunk of a list has, but the last, which has fewer or as many. It is a power of two:
// the root of a chunk is a node of the tree, so the roots of all are enough to prove a leaf of one.
const ChunkLeaves = 1024

// Prove returns the proof that the leaf at a place, from 0, is in the list: tlog.ProveRecord. Chunks are the roots of
// all chunks of the list, and leaves those of the chunk with the place.
func Prove(chunks, leaves []Hash, place int64) (tlog.RecordProof, error) {
	chunk, leaf := place/ChunkLeaves, int(place%ChunkLeaves)
	if place < 0 || chunk >= int64(len(chunks)) || leaf >= len(leaves) ||
		chunk < int64(len(chunks))-1 && len(leaves) != ChunkLeaves || RootOf(leaves) != chunks[chunk] {
		return nil, fmt.Errorf("prove place %d: %d leaves are not chunk %d of %d", place, len(leaves), chunk, len(chunks))
	}
	return append(path(leaves, leaf), path(chunks, int(chunk))...), nil
}

// path returns the roots of the subtrees beside the way from the nth leaf to the root.
func path(leaves []Hash, n int) tlog.RecordProof {
	if len(leaves) == 1 {
		return tlog.RecordProof{}
	}
	left := 1
	for 2*left < len(leaves) {
		left *= 2
	}
	if n < left {
		return append(path(leaves[:left], n), RootOf(leaves[left:]))
	}
	return append(path(leaves[left:], n-left), RootOf(leaves[:left]))
}
