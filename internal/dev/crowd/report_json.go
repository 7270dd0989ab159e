package crowd

import (
	"encoding/json"
	"time"
)

// latenciesView is Latencies as JSON, in milliseconds.
type latenciesView struct {
	Count int64   `json:"count"`
	P50   float64 `json:"p50"`
	P99   float64 `json:"p99"`
	P999  float64 `json:"p999"`
	Max   float64 `json:"max"`
}

func (l Latencies) view() latenciesView {
	return latenciesView{l.Count, millis(l.P50), millis(l.P99), millis(l.P999), millis(l.Max)}
}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

type durableView struct {
	Orders int     `json:"orders"`
	Rate   float64 `json:"per_second"`
	// LagMS is how long after the last acceptance the last order was durable.
	LagMS int64 `json:"lag_ms"`
}

// MarshalJSON returns the report as one object: rates per second, times in seconds, latencies in milliseconds.
func (r Report) MarshalJSON() ([]byte, error) {
	var durable *durableView
	if r.Durable != nil {
		lag := max(0, r.Durable.LastAt.Sub(r.LastAccepted).Milliseconds())
		if r.Accepted == 0 || r.Durable.Orders == 0 {
			lag = 0
		}
		durable = &durableView{r.Durable.Orders, r.Durable.Rate, lag}
	}
	return json.Marshal(struct {
		Buyers       int            `json:"buyers"`
		OfferedRate  float64        `json:"offered_per_second"`
		Seconds      float64        `json:"seconds"`
		Quantity     int64          `json:"quantity"`
		Clicks       int            `json:"clicks"`
		SecondClicks int            `json:"second_clicks"`
		Accepted     int            `json:"accepted"`
		AcceptedRate float64        `json:"accepted_per_second"`
		Replayed     int            `json:"replayed"`
		Rejected     int            `json:"rejected"`
		RejectedRate float64        `json:"rejected_per_second"`
		SoldOut      int            `json:"sold_out"`
		Already      int            `json:"already_purchased"`
		NotOnSale    int            `json:"not_on_sale"`
		Failures     map[string]int `json:"failures"`
		Retries      map[string]int `json:"retries"`
		Winners      latenciesView  `json:"winners_ms"`
		Losers       latenciesView  `json:"losers_ms"`
		Durable      *durableView   `json:"durable,omitempty"`
	}{
		r.Buyers, r.offeredRate(), r.Took.Seconds(), r.Quantity, r.Clicks, r.SecondClicks,
		r.Accepted, r.AcceptedRate, r.Replayed, r.Rejected, r.RejectedRate, r.SoldOut, r.Already, r.NotOnSale,
		orEmpty(r.Failures), orEmpty(r.Retries), r.Winners.view(), r.Losers.view(), durable,
	})
}

func orEmpty(counts map[string]int) map[string]int {
	if counts == nil {
		return map[string]int{}
	}
	return counts
}
