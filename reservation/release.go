package reservation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/google/uuid"

	"stampede/lua"
	"stampede/reservation/order"
)

// Release names a cancelled, expired or rejected order whose units return to its sale.
type Release struct {
	SaleID   uuid.UUID
	OrderID  uuid.UUID
	UserID   string
	Quantity int64
	// Lines are the units by item; empty in a sale without items.
	Lines order.Lines
	// KeyFingerprint is the fingerprint of the purchase's idempotency key; empty if there was none.
	KeyFingerprint string
	// Status is the order's final status: the answer to later retries of the request that made it, if
	// it is cancelled, rejected or expired.
	Status order.Status
}

// ReleaseResult is the word of lua/release.lua for its answer to one Release.
type ReleaseResult string

// The results of a release.
const (
	// Released: the units are for sale again, and the user may buy again.
	Released ReleaseResult = "released"
	// ReleaseNotHeld: the user holds no reservation of this order. It was released before, or never made.
	ReleaseNotHeld ReleaseResult = "not-held"
	// ReleaseUnknownSale: Redis has no such sale, and its server is verified.
	ReleaseUnknownSale ReleaseResult = "unknown-sale"
	// ReleaseDamaged: more units would be left than the stock, or the reservation cannot be read.
	// Nothing was done.
	ReleaseDamaged ReleaseResult = "damaged"
	// ReleaseUnreached: the shard of the user did not answer, or is not verified, while others were. Nothing is known
	// to be done: release it again.
	ReleaseUnreached ReleaseResult = "unreached"
)

// Release returns the units of these orders, each only once, and lets their users buy again. The
// results are in the order of releases. After an error nothing is known to be released: call it again with
// all of them. That happens while a sale is being rebuilt or its server is not verified. If only some shards cannot
// be reached, their orders are ReleaseUnreached.
func (s *Store) Release(ctx context.Context, releases []Release) ([]ReleaseResult, error) {
	bySale := make(map[uuid.UUID][]int)
	for i, r := range releases {
		bySale[r.SaleID] = append(bySale[r.SaleID], i)
	}
	results := make([]ReleaseResult, len(releases))
	var failed []error
	for sale, which := range bySale {
		if err := s.releaseIn(ctx, sale, releases, which, results); err != nil {
			failed = append(failed, fmt.Errorf("release orders of sale=%s: %w", sale, err))
		}
	}
	if err := errors.Join(failed...); err != nil {
		return nil, err
	}
	return results, nil
}

// releaseIn releases the orders of one sale with these indexes, and sets their results. The error is nil if any shard
// could be reached.
func (s *Store) releaseIn(
	ctx context.Context, sale uuid.UUID, releases []Release, which []int, results []ReleaseResult,
) error {
	// The place is not cached: releases are rare, and the epoch must be current.
	at, err := s.find(ctx, sale)
	if errors.Is(err, ErrSaleNotFound) {
		for _, i := range which {
			results[i] = ReleaseUnknownSale
		}
		return nil
	} else if err != nil {
		return err
	}
	byShard := make(map[int][]int)
	for _, i := range which {
		shard := at.layout.ShardOf(releases[i].UserID)
		byShard[shard] = append(byShard[shard], i)
	}
	var failed []error
	for shard, which := range byShard {
		if err := s.releaseInShard(ctx, sale, at, shard, releases, which, results); err != nil {
			failed = append(failed, err)
			for _, i := range which {
				results[i] = ReleaseUnreached
			}
		}
	}
	if len(failed) < len(byShard) {
		return nil
	}
	return errors.Join(failed...)
}

// releaseInShard releases orders of one shard of a sale that was just found there, and sets their results.
func (s *Store) releaseInShard(
	ctx context.Context, sale uuid.UUID, found address, shard int, releases []Release, which []int,
	results []ReleaseResult,
) error {
	partition, epoch := found.layout.Partition(shard), found.epoch
	if found.layout.Shards > 1 { // it was perhaps found in another shard, whose server is another one
		at, err := s.look(ctx, partition, sale)
		if errors.Is(err, ErrSaleNotFound) {
			return ErrLostSale
		} else if err != nil {
			return err
		}
		epoch = at.epoch
	}
	for some := range slices.Chunk(which, s.options.BatchMax) {
		if err := s.releaseSome(ctx, sale, partition, epoch, releases, some, results); err != nil {
			return err
		}
	}
	return nil
}

// releaseSome releases some orders of one shard, and sets their results.
func (s *Store) releaseSome(
	ctx context.Context, sale uuid.UUID, partition int, epoch int64, releases []Release, which []int,
	results []ReleaseResult,
) error {
	args := make([]any, 0, 1+4*len(which))
	args = append(args, strconv.FormatInt(epoch, 10))
	for _, i := range which {
		r := &releases[i]
		args = append(
			args, r.UserID, order.CompactID(r.OrderID), cmp.Or(r.KeyFingerprint, order.NoKey),
			ending(r.Quantity, r.Lines, r.Status),
		)
	}
	keys := s.Keys.OfShard(partition, sale)
	answers, err := lua.Release.Run(ctx, s.Redis, keys, args...).StringSlice()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	if len(answers) != len(which) {
		return fmt.Errorf("%w: the script returned %d answers for %d orders", ErrUnavailable, len(answers), len(which))
	}
	for at, answer := range answers {
		switch result := ReleaseResult(answer); result {
		case Released, ReleaseNotHeld, ReleaseDamaged:
			results[which[at]] = result
		case ReleaseUnknownSale:
			return ErrLostSale
		default:
			return fmt.Errorf("%w: its epoch has just changed (%s)", ErrUnavailable, answer)
		}
	}
	return nil
}

// The hash Keys.Ended holds the ended orders that were made with an idempotency key, so that the
// request that made an order never makes another one. lua/release.lua and a rebuild write it:
//
//	<key><user> -> <order id> <quantity> <status>
//
// In a sale with items the Lines stand in the place of the quantity.
//
// The key is a fingerprint, the order id a CompactID, and the status one letter. Entries stay as
// long as the sale is in Redis.

// endingLetters are the final statuses that a retried request gets. Voided is not among them: such
// an order was lost with Redis, so the same request buys again.
var endingLetters = map[order.Status]string{
	order.StatusCancelled: "c", order.StatusExpired: "e", order.StatusRejected: "r",
}

// EndedOrder is an ended order, with the user and the key that identify its request.
type EndedOrder struct {
	User           string
	KeyFingerprint string
	OrderID        uuid.UUID
	Quantity       int64
	// Lines are the units by item; empty in a sale without items.
	Lines  order.Lines
	Status order.Status
}

// field is the field of the order in Keys.Ended.
func (e *EndedOrder) field() string { return e.KeyFingerprint + e.User }

// ending is the value after the order's id, or notRecorded for an order that must not be found by
// its request.
func ending(quantity int64, lines order.Lines, status order.Status) string {
	letter, known := endingLetters[status]
	if !known {
		return notRecorded
	}
	return string(order.AppendUnits(nil, quantity, lines)) + " " + letter
}

const notRecorded = "-"

// ParseEnded reads a value of Keys.Ended, which has neither user nor key.
func ParseEnded(text string) (e EndedOrder, err error) {
	fields := strings.Split(text, " ")
	if len(fields) != 3 {
		return EndedOrder{}, fmt.Errorf("an ended order has 3 fields, this one %d", len(fields))
	}
	if e.OrderID, err = order.ParseCompactID(fields[0]); err != nil {
		return EndedOrder{}, err
	}
	if e.Quantity, e.Lines, err = order.ParseUnits(fields[1]); err != nil {
		return EndedOrder{}, fmt.Errorf("the quantity of an ended order is %q", fields[1])
	}
	for status, letter := range endingLetters {
		if letter == fields[2] {
			e.Status = status
			return e, nil
		}
	}
	return EndedOrder{}, fmt.Errorf("%q is not the status of an ended order", fields[2])
}
