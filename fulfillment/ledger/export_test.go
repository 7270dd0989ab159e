package ledger

import (
	"github.com/prometheus/client_golang/prometheus"

	"stampede/reservation/order"
)

func (x *Outcomes) Published() prometheus.Counter { return x.published }

func (x *Outcomes) Dropped() prometheus.Counter { return x.dropped }

func (x *Outcomes) Enqueue(outcomes []order.OrderOutcome) {
	x.enqueue([][]order.OrderOutcome{outcomes})
}

const OutcomesQueued = outcomesQueued

const OutcomesKept = outcomesKept

var WriteChange = writeChange

var ErrNotLocked = errNotLocked
