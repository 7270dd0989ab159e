package batch

import (
	"context"

	"stampede/internal/tracing"
	"stampede/ledger"
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
		if s.delivery != nil {
			span.Text("stampede.entry_id", s.delivery.entry)
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
	t.batch.Number("stampede.orders", int64(len(batch)))
	t.batch.Number("stampede.partition", int64(b.Partition))
	for _, s := range t.orders[1:] {
		s.span.Link(t.batch.Parent())
	}
	return t.batch.In(ctx), t
}

func (t *tracedBatch) end() {
	if t == nil {
		return
	}
	t.batch.End()
	for _, s := range t.orders {
		s.span.End()
		s.span = tracing.Span{} // the order may be in a later batch
	}
}

// noteOutcome notes what became of an order.
func noteOutcome(span tracing.Span, out ledger.Outcome) {
	if !span.On() {
		return
	}
	span.Fail(out.Err)
	if out.Err == nil {
		span.Text("stampede.status", string(out.Status))
		if !out.Fresh {
			span.Text("stampede.repeat", "true")
		}
	}
}
