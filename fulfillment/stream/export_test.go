package stream

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"
)

func (x *BacklogCollector) Read(ctx context.Context, stream string) (Backlog, error) {
	return x.read(ctx, stream)
}

const CountedFor = countedFor

func (x *Subscriber) Config() Config { return x.config }

const LeaseKept = leaseKept

const LeaseGone = leaseGone

const LeaseTaken = leaseTaken

type ReadOnce = readOnce

var NewSubscription = newSubscription

func (x *Trimmer) Trimmed() *prometheus.CounterVec { return x.trimmed }
