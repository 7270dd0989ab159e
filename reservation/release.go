package reservation

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/google/uuid"

	"stampede/lua"
)

// Release names an order that came to nothing, whose units go back to its sale.
type Release struct {
	SaleID  uuid.UUID
	OrderID uuid.UUID
	UserID  string
}

// Release gives the units of these orders back, each once however often it is called, and lets their
// users buy again. An order of which Redis knows nothing is passed over: it was released before, or
// its sale was lost, and a rebuild from Postgres will not count it. An error means that some may not
// be released yet: call it again with all of them.
func (s *Store) Release(ctx context.Context, releases []Release) error {
	bySale := make(map[uuid.UUID][]Release)
	for _, r := range releases {
		bySale[r.SaleID] = append(bySale[r.SaleID], r)
	}
	var failed []error
	for sale, orders := range bySale {
		for len(orders) > 0 {
			n := min(len(orders), s.o.BatchMax)
			if err := s.releaseSome(ctx, sale, orders[:n]); err != nil {
				failed = append(failed, fmt.Errorf("release orders of sale=%s: %w", sale, err))
			}
			orders = orders[n:]
		}
	}
	return errors.Join(failed...)
}

func (s *Store) releaseSome(ctx context.Context, sale uuid.UUID, orders []Release) error {
	// Looked up each time and not remembered: a worker releases seldom, and the epoch must be today's.
	p, err := s.locate(ctx, sale)
	if errors.Is(err, ErrSaleNotFound) {
		return nil
	} else if err != nil {
		return err
	}
	args := make([]any, 0, 1+2*len(orders))
	args = append(args, strconv.FormatInt(p.epoch, 10))
	for _, r := range orders {
		args = append(args, r.UserID, r.OrderID.String())
	}
	keys := []string{s.keys.Sale(p.partition, sale), s.keys.Buyers(p.partition, sale)}
	answers, err := lua.Release.Run(ctx, s.rdb, keys, args...).StringSlice()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	for i, answer := range answers {
		switch answer {
		case "released", "not-held", "unknown-sale":
		case "stale-epoch":
			return fmt.Errorf("%w: its epoch has just changed", ErrUnavailable)
		default:
			s.o.Logger.Error("an order's units were not given back", "sale", sale, "order", orders[i].OrderID, "answer", answer)
		}
	}
	return nil
}
