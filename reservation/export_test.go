package reservation

import "github.com/google/uuid"

// What the simulation of many shards (shards_simulation_test.go) uses as the Store does.
type (
	SaleCount  = saleCount
	ShardCount = shardCount
	Gift       = gift
)

const (
	GiveParts    = giveParts
	SoldOutTrust = soldOutTrust
)

var ReadCount = readCount

func NewSaleCount(shards []*ShardCount) *SaleCount { return &SaleCount{shards: shards} }

func (c *SaleCount) Equal(other *SaleCount) bool           { return c.equal(other) }
func (c *SaleCount) ForSale(line int) int64                { return c.forSale(line) }
func (c *SaleCount) OnTheWay() []Gift                      { return c.onTheWay() }
func (c *SaleCount) Wishes(to int, wanted ...int64) []Gift { return c.wishes(to, sold, wanted) }

func (g Gift) From() int     { return g.from }
func (g Gift) To() int       { return g.to }
func (g Gift) Total() string { return string(g.total) }
func (g Gift) Items() string { return g.items }

// With is the gift with what the giver has answered, and false if it has given nothing.
func (g Gift) With(text string) (Gift, bool) {
	return gift{from: g.from, to: g.to, total: total(text)}, total(text).exceeds(g.total)
}

// Waiting is how many requests wait for the first shard of a sale.
func (s *Store) Waiting(sale uuid.UUID) int {
	q := s.knownSeller(sale).queues[0]
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.waiting)
}
