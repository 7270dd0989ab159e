package audit_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/reservation"
)

// BenchmarkAudit audits a sale of 100,000 orders.
func BenchmarkAudit(b *testing.B) {
	s := testshop.NewShop(b)
	const orders = 100_000
	sale := s.Open(b, orders)
	for i := 0; i < orders; i += 1000 {
		var wg sync.WaitGroup
		for j := range 1000 {
			wg.Go(func() {
				request := reservation.Request{Sale: sale, User: fmt.Sprintf("user-%d", i+j), Quantity: 1}
				if _, err := s.Store.Reserve(context.Background(), request); err != nil {
					b.Error(err)
				}
			})
		}
		wg.Wait()
		testwork.Fulfil(b, s)
	}
	for b.Loop() {
		report := testwork.Audit(b, s, sale)
		if report.Broken() || report.Sales[0].LiveOrders != orders {
			b.Fatal(testwork.Text(b, report))
		}
	}
}
