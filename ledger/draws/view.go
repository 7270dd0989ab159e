package draws

import (
	"time"

	"stampede/draw"
	"stampede/reservation/order"
)

// View is the draw as everybody sees it.
func (d *Draw) View() draw.View {
	v := draw.View{
		Version: d.Version,
		SaleID:  d.SaleID, EntriesSaleID: d.EntriesID, State: string(d.State), CreatedAt: order.TimeText(d.CreatedAt),
		ClosesAt: order.TimeText(d.ClosesAt), FreezeSeconds: int64(d.Freeze / time.Second), Rounds: d.Rounds, Round: d.Round(),
		Parties: d.Parties, RevealBy: order.TimeText(d.RevealBy), Root: d.Root, FrozenAt: order.TimeText(d.FrozenAt), Goods: d.Goods,
		Signature: d.Signature, Seed: d.Seed, SeededAt: order.TimeText(d.SeededAt), RankedAt: order.TimeText(d.RankedAt),
		Offered: d.Offered, Skipped: d.Skipped, Opening: d.Opening && d.State != Void,
		VoidReason: d.VoidReason, VoidedAt: order.TimeText(d.VoidedAt),
	}
	if v.Round != 0 {
		v.RoundAt = order.TimeText(draw.RoundTime(v.Round))
	}
	if len(d.Root) > 0 {
		v.Entries = &d.Entries
	}
	if last := d.Offered + d.Skipped - 1; last >= 0 && len(d.Items) == 0 {
		v.LastRank = &last
	}
	return v
}
