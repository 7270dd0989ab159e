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
		SaleID:  d.SaleID, EntriesSaleID: d.EntriesID, State: string(d.State), CreatedAt: timestamp(d.CreatedAt),
		ClosesAt: timestamp(d.ClosesAt), FreezeSeconds: int64(d.Freeze / time.Second), Rounds: d.Rounds, Round: d.Round(),
		Parties: d.Parties, RevealBy: timestamp(d.RevealBy), Root: d.Root, FrozenAt: timestamp(d.FrozenAt), Goods: d.Goods,
		Signature: d.Signature, Seed: d.Seed, SeededAt: timestamp(d.SeededAt), RankedAt: timestamp(d.RankedAt),
		Offered: d.Offered, Skipped: d.Skipped, Opening: d.Opening && d.State != Void,
		VoidReason: d.VoidReason, VoidedAt: timestamp(d.VoidedAt),
	}
	if v.Round != 0 {
		v.RoundAt = timestamp(draw.RoundTime(v.Round))
	}
	if len(d.Root) > 0 {
		v.Entries = &d.Entries
	}
	if last := d.Offered + d.Skipped - 1; last >= 0 && len(d.Items) == 0 {
		v.LastRank = &last
	}
	return v
}

func timestamp(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return string(order.AppendTime(nil, t))
}
