package reservation

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"stampede/lua"
	"stampede/reservation/order"
)

// unixMilli is 0 for the zero time, as the scripts expect.
func unixMilli(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}

// The steps of a rebuild in Redis, in this order: CloseSale; StageBuyers and StageEnded as often as
// needed; OpenRebuilt; and MarkVerified for the server when all live sales of a partition are
// rebuilt. Each may be repeated. Errors wrap ErrUnavailable if Redis could not be reached or refused
// the call.

var (
	// ErrSaleNotClosed is returned by OpenRebuilt for a sale that is not closed for this rebuild: another one
	// has closed or opened it meanwhile, or Redis has lost it.
	ErrSaleNotClosed = errors.New(
		"the sale is not closed for this rebuild: another rebuild has closed or opened it, or Redis has lost it",
	)
	// ErrHoldersMissing is returned by OpenRebuilt if the number of staged buyers or ended orders
	// is wrong.
	ErrHoldersMissing = errors.New("the number of staged buyers or ended orders is wrong")
)

// NewRebuildToken returns a unique name for one attempt at a rebuild. Its writes to Redis carry the
// token and are void once another rebuild begins there, so rebuilds need no lock to be correct.
func NewRebuildToken() string { return rand.Text() }

// Holder is a buyer of a sale with the reservation, from Postgres.
type Holder struct {
	User        string
	Reservation order.Reservation
	// KeyFingerprint is the fingerprint of the purchase's idempotency key; empty if there was none.
	KeyFingerprint string
	// Epoch is the epoch in which the reservation was made.
	Epoch int64
}

// StateRetired is the state of a retired sale in Redis (lua/retire.lua).
const StateRetired = "retired"

// Rebuilt is a rebuilt shard of a sale. Sale.Epoch is the new epoch, and Sale.Revision the revision that
// began it.
type Rebuilt struct {
	Sale  Sale
	Shard int
	// Left is the number of unreserved units of the shard, and Held that of its staged buyers.
	Left, Held int64
	// LeftItems and HeldItems are the same of each item, by its place in Sale.Items.
	LeftItems, HeldItems []int64
	// LastPlace is the highest place that the sale ever gave out, in any shard.
	LastPlace int64
	// Holders and Ended are the numbers of staged buyers and ended orders.
	Holders, Ended int64
	// Token is the token with which the sale was closed and the buyers were staged.
	Token string
	// Retired is true for a sale of which Redis has only the end (lua/retire.lua). It has no units and no buyers.
	Retired bool
}

// CloseSale closes a sale for the rebuild with that token, whether or not Redis has it: no sales,
// releases or changes happen until OpenRebuilt with the same token. The epoch is the one read from
// Postgres before; only a later one can be opened.
func (s *Servers) CloseSale(
	ctx context.Context, sale uuid.UUID, partition int, token string, epoch int64,
) (ClosedSale, error) {
	known, err := lua.Close.Run(ctx, s.Redis, []string{s.Keys.Sale(partition, sale)}, token, epoch).Slice()
	var closed ClosedSale
	if err == nil {
		closed, err = readClosed(known)
	}
	if err != nil {
		return ClosedSale{}, fmt.Errorf("%w: close sale=%s: %w", ErrUnavailable, sale, err)
	}
	return closed, nil
}

func readClosed(values []any) (c ClosedSale, err error) {
	var ok [3]bool
	if len(values) == len(ok) {
		c.Sequence, ok[0] = values[0].(int64)
		c.Epoch, ok[1] = values[1].(int64)
		c.LastToken, ok[2] = values[2].(string)
	}
	if !ok[0] || !ok[1] || !ok[2] {
		return ClosedSale{}, fmt.Errorf("the script returned %v", values)
	}
	return c, nil
}

// ClosedSale is the state of a sale that was closed for a rebuild: 0 for what Redis has lost.
type ClosedSale struct {
	// Sequence is the highest that was assigned, and Epoch the highest before. An epoch later than
	// that of Postgres shows that Postgres was set back.
	Sequence, Epoch int64
	// LastToken is the token of an earlier rebuild that closed the sale and did not open it.
	LastToken string
}

const (
	// stagedFor is how long staged buyers wait for OpenRebuilt. Those of an interrupted rebuild
	// expire.
	stagedFor = time.Hour
	// holdersPerCommand bounds how long one command blocks Redis.
	holdersPerCommand = 1000
)

// StageBuyers stages buyers for the next epoch, separate from the current ones and from those of
// other rebuilds. It may be called many times, and again with the same holders. The caller bounds
// their number.
func (s *Servers) StageBuyers(
	ctx context.Context, partition int, sale uuid.UUID, token string, epoch int64, holders []Holder,
) error {
	if len(holders) == 0 {
		return nil
	}
	err := s.stage(ctx, s.Keys.Staged(partition, sale, token), len(holders), func(i int) (field, value any) {
		held := holders[i].Reservation
		held.Epoch = holders[i].Epoch
		return holders[i].User, order.AppendReservation(make([]byte, 0, order.ReservationTextMax), held,
			holders[i].KeyFingerprint, epoch)
	})
	if err != nil {
		return fmt.Errorf("%w: stage buyers of sale=%s: %w", ErrUnavailable, sale, err)
	}
	return nil
}

// StageEnded is StageBuyers for orders that have ended.
func (s *Servers) StageEnded(
	ctx context.Context, partition int, sale uuid.UUID, token string, orders []EndedOrder,
) error {
	if len(orders) == 0 {
		return nil
	}
	err := s.stage(ctx, s.Keys.StagedEnded(partition, sale, token), len(orders), func(i int) (field, value any) {
		e := &orders[i]
		return e.field(), order.CompactID(e.OrderID) + " " + ending(e.Quantity, e.Lines, e.Status)
	})
	if err != nil {
		return fmt.Errorf("%w: stage ended orders of sale=%s: %w", ErrUnavailable, sale, err)
	}
	return nil
}

// stage writes n fields of a hash that expires.
func (s *Servers) stage(ctx context.Context, key string, n int, at func(i int) (field, value any)) error {
	_, err := s.Redis.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i := 0; i < n; {
			fields := make([]any, 0, 2*min(n-i, holdersPerCommand))
			for ; len(fields) < cap(fields); i++ {
				field, value := at(i)
				fields = append(fields, field, value)
			}
			p.HSet(ctx, key, fields...)
		}
		p.Expire(ctx, key, stagedFor)
		return nil
	})
	return err
}

// OpenRebuilt replaces a shard with the rebuilt one and the staged buyers in one step. It returns
// ErrSaleNotClosed or ErrHoldersMissing if it did nothing. A shard that is already in that epoch stays
// unchanged.
func (s *Servers) OpenRebuilt(ctx context.Context, r Rebuilt) error {
	sale, layout := &r.Sale, r.Sale.Layout()
	p := layout.Partition(r.Shard)
	state := sale.stateInRedis(r.Left)
	if r.Retired {
		state = StateRetired
	}
	keys := []string{
		s.Keys.Sale(p, sale.ID), s.Keys.Buyers(p, sale.ID), s.Keys.Staged(p, sale.ID, r.Token), s.Keys.Sales(p),
		s.Keys.Ended(p, sale.ID), s.Keys.StagedEnded(p, sale.ID, r.Token),
	}
	args := []any{
		sale.ID.String(), sale.Epoch, r.Holders, sale.Revision, r.Left + r.Held, r.Left,
		layout.FirstSequence(r.LastPlace, r.Shard), sale.quantityLimit(), unixMilli(sale.OpensAt), unixMilli(sale.ClosesAt),
		int64(sale.PaymentWindow / time.Second), state, r.Token, r.Ended, layout.Field(r.Shard),
	}
	args = append(args, sale.itemArgs()...)
	for place, left := range r.LeftItems {
		args = append(args, left+r.HeldItems[place], left, sale.Items[place].PerOrderLimit)
	}
	answer, err := lua.Rebuilt.Run(ctx, s.Redis, keys, args...).Text()
	switch {
	case err != nil:
		return fmt.Errorf("%w: open the rebuilt sale=%s: %w", ErrUnavailable, sale.ID, err)
	case answer == "rebuilt", answer == "unchanged":
		return nil
	case answer == "not-closed":
		return fmt.Errorf("open the rebuilt sale=%s: %w", sale.ID, ErrSaleNotClosed)
	default:
		return fmt.Errorf("open the rebuilt sale=%s: %w: %s, want %d buyers and %d ended orders", sale.ID,
			ErrHoldersMissing, answer, r.Holders, r.Ended)
	}
}

// stateInRedis is the state of a rebuilt sale with that many units left, and its open_state (lua/reserve.lua). It is
// not known whether somebody waits for units that are left: they are offered until Reopen.
func (s *Sale) stateInRedis(left int64) string {
	if s.EntriesID == uuid.Nil && !s.OffersOnly || s.State == StateEnded {
		return string(s.State)
	}
	open := StateOffers
	if s.Waitlist && (left == 0 || len(s.Items) > 0) { // which offer each by itself
		open = StateWaitlist
	}
	if s.State == StateOpen {
		return string(open + " " + open)
	}
	return string(s.State + " " + open)
}

// quantityLimit is the limit of an order without lines. A sale with items has no such orders: a version that does not
// know items sells nothing of it.
func (s *Sale) quantityLimit() int64 {
	if len(s.Items) > 0 {
		return 0
	}
	return s.PerOrderLimit
}

// itemArgs are the arguments of lua/open.lua and lua/rebuilt.lua for the items as a whole.
func (s *Sale) itemArgs() []any {
	if len(s.Items) == 0 {
		return nil
	}
	return []any{strings.Join(s.Codes(), " "), s.PerOrderLimit}
}

// OpenShard adds a new shard of a sale to Redis, with its share of that stock, or of that of the items. A shard that
// exists in the same epoch stays unchanged. The error wraps ErrLostSale if Redis has lost the shard.
func (s *Servers) OpenShard(ctx context.Context, sale Sale, shard int, revision, stock int64) error {
	layout := sale.Layout()
	p := layout.Partition(shard)
	share, items := layout.Share(stock, shard), sale.itemArgs()
	if len(sale.Items) > 0 {
		share = 0
	}
	for place, item := range sale.Items {
		its := layout.ShareOfItem(place, item.Stock, shard)
		share, items = share+its, append(items, its, item.PerOrderLimit)
	}
	keys := []string{s.Keys.Sale(p, sale.ID), s.Keys.Buyers(p, sale.ID), s.Keys.Sales(p)}
	args := []any{
		sale.ID.String(), sale.Epoch, revision, share, sale.quantityLimit(), unixMilli(sale.OpensAt),
		unixMilli(sale.ClosesAt),
		int64(sale.PaymentWindow / time.Second), layout.FirstSequence(0, shard), layout.Field(shard),
	}
	answer, err := lua.Open.Run(ctx, s.Redis, keys, append(args, items...)...).Text()
	switch {
	case err != nil:
		return err
	case answer == "opened" || answer == "unchanged":
		return nil
	case answer == "buyers-remain":
		return fmt.Errorf("%w (%s)", ErrLostSale, answer)
	}
	return fmt.Errorf("sale=%s: it was not opened in Redis: %s", sale.ID, answer)
}

// AppendReserved appends lost orders of one sale to the stream again; duplicates are harmless. It
// returns for each order whether it was appended, which needs a readable reservation that is in
// force. After an error some may be appended. Errors wrap ErrUnavailable.
func (s *Servers) AppendReserved(
	ctx context.Context, partition int, sale uuid.UUID, events []order.OrderReserved,
) ([]bool, error) {
	appended := make([]bool, 0, len(events))
	for len(events) > 0 {
		n := min(len(events), order.MaxPerMessage)
		// Reservations of earlier epochs than the sale's say so themselves.
		last := slices.MaxFunc(events[:n], func(x, y order.OrderReserved) int { return cmp.Compare(x.Epoch, y.Epoch) })
		args := append(make([]any, 0, 1+2*n), order.ReservedMetadataPrefix(sale, last.Epoch, last.Lines != ""))
		for _, e := range events[:n] {
			args = append(args, e.UserID, order.CompactID(e.OrderID))
		}
		keys := []string{s.Keys.Buyers(partition, sale), s.Keys.Orders(partition)}
		answers, err := lua.Append.Run(ctx, s.Redis, keys, args...).StringSlice()
		if err == nil && len(answers) != n {
			err = fmt.Errorf("the script returned %d answers for %d orders", len(answers), n)
		}
		if err != nil {
			return nil, fmt.Errorf("%w: append events of sale=%s: %w", ErrUnavailable, sale, err)
		}
		for _, answer := range answers {
			appended = append(appended, answer == "appended")
		}
		events = events[n:]
	}
	return appended, nil
}
