package limits

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/bench/httpload"
	"stampede/bench/rig"
)

const (
	paymentRate  = 500
	buyersAlone  = "purchases alone"
	buyersPaying = "purchases beside 500 payments a second"
	paymentsOnly = "500 payments a second alone"
	buyersPaced  = "500 purchases a second alone"
)

// BenchmarkPayments measures reports of payments beside the highest load of purchases, and what they cost purchases.
func BenchmarkPayments(b *testing.B) {
	results := rig.Compare(b, rig.Candidate{Name: buyersAlone, Turn: reports(0, true)},
		rig.Candidate{Name: buyersPaying, Turn: reports(paymentRate, true)},
		rig.Candidate{Name: paymentsOnly, Turn: reports(paymentRate, false)},
		rig.Candidate{Name: buyersPaced, Turn: pacedPurchases})
	ratio := results.Ratio(buyersPaying, perSecond, buyersAlone, perSecond)
	table := rig.Table{
		Title: "Payments beside a crowd",
		Note: fmt.Sprintf("Accepted purchases of a closed loop with a worker, and the time of `POST /v1/payments` in an "+
			"open loop; medians of %d rounds. Beside payments %s times as many are accepted. The CPU time is that of the "+
			"ingress and of Postgres for a payment, or for a purchase at the same rate.", b.N, ratio.Format(rig.Ratio)),
		Head: []string{"", "purchases/s", "payment p50, ms", "payment p99, ms", "CPU, ms"},
	}
	for _, name := range []string{buyersAlone, buyersPaying, paymentsOnly, buyersPaced} {
		table.Rows = append(table.Rows, append([]string{name, results.Of(name, perSecond).Format(rig.Count)},
			results.Ranges(rig.Ratio, name, "p50", "p99", "cpu")...))
	}
	rig.Put(table)
	b.ReportMetric(ratio.Median, "with÷without")
}

// reports is `stampede serve` with a worker, so many reports of payments in a second, and perhaps a crowd beside them.
func reports(rate float64, crowd bool) turn {
	return func(b *testing.B, _ int) rig.Values {
		s := rig.Stampede{}.Start(b, hugeStock)
		defer s.Close()
		load := s.Payments(int(paymentRate * turnDuration(b).Seconds()))
		load.Connections, load.For, load.Rate = crowdConnections, turnDuration(b), rate
		s.Warm(crowdConnections)
		var paid httpload.Answers
		var paying errgroup.Group
		before := s.CPU()
		if rate > 0 {
			paying.Go(func() (err error) {
				paid, err = load.Measure(b.Context())
				return err
			})
		}
		values := rig.Values{}
		if crowd {
			values, _ = accept(b, s)
		}
		require.NoError(b, paying.Wait())
		if rate > 0 {
			used, settled := s.CPU().Since(before), s.Settled()
			if !crowd { // beside buyers it cannot be told apart
				values["cpu"] = frontAndPostgres(used, settled)
			}
			// Reports that were due and could not be sent in time are among the latencies.
			require.Equal(b, map[int]int64{http.StatusOK: settled}, paid.ByStatus, "answers: %s", paid)
			values["p50"], values["p99"] = rig.InMillis(paid.Percentile(50)), rig.InMillis(paid.Percentile(99))
		}
		return values
	}
}

// pacedPurchases is what the cost of payments is compared with.
func pacedPurchases(b *testing.B, _ int) rig.Values {
	s := rig.Stampede{}.Start(b, hugeStock)
	defer s.Close()
	s.Warm(crowdConnections)
	crowd := s.Crowd(1)
	crowd.Connections, crowd.For, crowd.Rate = crowdConnections, turnDuration(b), paymentRate
	before := s.CPU()
	accepted := s.Measure(crowd).Wanted
	return rig.Values{"cpu": frontAndPostgres(s.CPU().Since(before), accepted)}
}

// frontAndPostgres is the CPU time of the ingress and of Postgres for each of so many, in milliseconds.
func frontAndPostgres(used rig.Usage, of int64) float64 {
	each := used.PerOrder(of)
	return (each[rig.Front] + each[rig.Postgres]) / 1000
}
