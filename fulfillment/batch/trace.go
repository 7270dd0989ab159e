package batch

import (
	"context"
	"time"

	"stampede/internal/tracing"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/stream"
)

// tracedBatch holds the spans of a batch with traced orders: one for each of these, in the trace of its purchase, and
// one of the batch. The span of the batch is in the trace of the first order. It has links to the other orders, and
// they have links to it.
type tracedBatch struct {
	batch  tracing.Span
	orders []*submission
}

// trace starts the spans of a batch. It returns nil if no order is traced, as nearly always. The context has the
// span of the batch.
func (b *Batcher) trace(ctx context.Context, batch []*submission) (context.Context, *tracedBatch) {
	if b.Tracer == nil {
		return ctx, nil
	}
	var t *tracedBatch
	for _, s := range batch {
		span := b.Tracer.Continue(tracing.Consumer, "record order", s.event.TraceParent)
		if !span.On() {
			continue
		}
		span.Text("stampede.order_id", s.event.OrderID.String())
		span.Text("stampede.sale_id", s.event.SaleID.String())
		span.Text("messaging.system", "redis")
		span.Text("messaging.operation.name", "record")
		span.Text("messaging.operation.type", "process")
		span.Text("messaging.destination.name", b.Keys.Orders(b.Partition))
		span.Text("messaging.consumer.group.name", reservation.Group)
		if s.delivery != nil {
			span.Text("messaging.message.id", s.delivery.entry)
			b.noteWaits(s)
		}
		s.span = span
		if t == nil {
			t = &tracedBatch{}
		}
		t.orders = append(t.orders, s)
	}
	if t == nil {
		return ctx, nil
	}
	others := make([]string, len(t.orders)-1)
	for i, s := range t.orders[1:] {
		others[i] = s.span.Parent()
	}
	t.batch = t.orders[0].span.Start(tracing.Internal, "batch", others...)
	t.batch.Number("messaging.batch.message_count", int64(len(batch)))
	t.batch.Number("stampede.partition", int64(b.Partition))
	for _, s := range t.orders[1:] {
		s.span.Link(t.batch.Parent())
	}
	return t.batch.In(ctx), t
}

// noteWaits makes the spans of an order's way to this batch: in the stream, and in this worker.
func (b *Batcher) noteWaits(s *submission) {
	if s.waits.IsZero() {
		s.waits = s.delivery.arrived
		b.Tracer.Past("wait in stream", s.event.TraceParent, s.event.ReservedAt, s.waits)
	}
	b.Tracer.Past("wait for batch", s.event.TraceParent, s.waits, time.Now())
}

func (t *tracedBatch) end() {
	if t == nil {
		return
	}
	t.batch.End()
	for _, s := range t.orders {
		s.span.End()
		s.span, s.waits = tracing.Span{}, time.Now() // the order may be in a later batch
	}
}

// noteOutcome notes what became of an order. What is left then is the ack of its message.
func (b *Batcher) noteOutcome(s *submission, out ledger.Outcome) {
	if !s.span.On() {
		return
	}
	s.span.Fail(out.Err)
	if out.Err != nil || s.delivery == nil {
		return
	}
	s.span.Text("stampede.status", string(out.Status))
	if !out.Fresh {
		s.span.Text("stampede.repeat", "true")
	}
	ack := b.Tracer.Continue(tracing.Client, "ack", s.event.TraceParent)
	ack.Text("messaging.system", "redis")
	ack.Text("messaging.operation.name", "ack")
	ack.Text("messaging.operation.type", "settle")
	s.delivery.mu.Lock()
	defer s.delivery.mu.Unlock()
	s.delivery.acks = append(s.delivery.acks, ack)
}

// endAcks is called when Redis has the ack, or when it was given up.
func (d *delivery) endAcks(sent bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, ack := range d.acks {
		if !sent {
			ack.Fail(stream.ErrStopping)
		}
		ack.End()
	}
}
