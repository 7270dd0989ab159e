package draw

import "github.com/google/uuid"

// View is a draw as everybody sees it, in JSON. What is not known yet is left out. Times are those of order.AppendTime.
type View struct {
	Version       int       `json:"version"`
	SaleID        uuid.UUID `json:"sale_id"`
	EntriesSaleID uuid.UUID `json:"entries_sale_id"`
	State         string    `json:"state"`
	CreatedAt     string    `json:"created_at"`
	ClosesAt      string    `json:"closes_at"`
	FreezeSeconds int64     `json:"freeze_seconds"`
	// Rounds are the rounds so far, of which Round, the last one, gives the seed, from RoundAt on.
	Rounds  []int64 `json:"rounds,omitempty"`
	Round   int64   `json:"round,omitzero"`
	RoundAt string  `json:"round_at,omitempty"`
	// Parties are those that give the seed in place of a round, until RevealBy.
	Parties  []Party `json:"parties,omitempty"`
	RevealBy string  `json:"reveal_by,omitempty"`
	// Entries is nil until the list is frozen.
	Entries  *int64 `json:"entries,omitempty"`
	Root     Hex    `json:"root,omitempty"`
	FrozenAt string `json:"frozen_at,omitempty"`
	// Goods are the units when the list was frozen; nil in version 1.
	Goods     *Goods `json:"goods,omitempty"`
	Signature Hex    `json:"signature,omitempty"`
	Seed      Hex    `json:"seed,omitempty"`
	SeededAt  string `json:"seeded_at,omitempty"`
	RankedAt  string `json:"ranked_at,omitempty"`
	Offered   int64  `json:"offered"`
	Skipped   int64  `json:"skipped"`
	// LastRank is the last one that had its turn. Of a sale with items there is none: each item has its own.
	LastRank *int64 `json:"last_rank,omitempty"`
	// Opening is true if what is left is for everybody when each rank had its turn.
	Opening    bool   `json:"opening,omitzero"`
	VoidReason string `json:"void_reason,omitempty"`
	VoidedAt   string `json:"voided_at,omitempty"`
}
