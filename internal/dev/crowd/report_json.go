package crowd

import (
	"encoding/json"
	"time"
)

// MarshalJSON returns the latencies in milliseconds.
func (l Latencies) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		Count int64   `json:"count"`
		P50   float64 `json:"p50"`
		P99   float64 `json:"p99"`
		P999  float64 `json:"p999"`
		Max   float64 `json:"max"`
	}{l.Count, millis(l.P50), millis(l.P99), millis(l.P999), millis(l.Max)})
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
	if r.Failures == nil {
		r.Failures = map[string]int{}
	}
	if r.Retries == nil {
		r.Retries = map[string]int{}
	}
	type fields Report // without this method
	return json.Marshal(struct {
		fields
		OfferedRate float64      `json:"offered_per_second"`
		Seconds     float64      `json:"seconds"`
		Durable     *durableView `json:"durable,omitempty"`
	}{fields(r), r.offeredRate(), r.Took.Seconds(), durable})
}
