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

func (c *SaleCount) Equal(other *SaleCount) bool      { return c.equal(other) }
func (c *SaleCount) ForSale() int64                   { return c.forSale() }
func (c *SaleCount) OnTheWay() []Gift                 { return c.onTheWay() }
func (c *SaleCount) Wishes(to int, wanted int) []Gift { return c.wishes(to, sold, int64(wanted)) }

func (g Gift) From() int    { return g.from }
func (g Gift) To() int      { return g.to }
func (g Gift) Total() int64 { return g.total }

func (g Gift) With(total int64) Gift { return gift{g.from, g.to, total} }

// Waiting is how many requests wait for the first shard of a sale.
func (s *Store) Waiting(sale uuid.UUID) int {
	q := s.knownSeller(sale).queues[0]
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.waiting)
}
