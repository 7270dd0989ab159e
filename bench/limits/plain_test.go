package limits

import (
	"fmt"
	"testing"

	"stampede/bench/rig"
)

const (
	withReader    = "`stampede serve`, plain purchases in front of net/http"
	withoutReader = "`stampede serve --plain-reader=off`"
)

// BenchmarkPlainReader compares an ingress that reads plain purchases in front of net/http with one that does not.
func BenchmarkPlainReader(b *testing.B) {
	mode := func(reader string) turn {
		return func(b *testing.B, _ int) rig.Values {
			return serve(b, rig.Stampede{Env: []string{"STAMPEDE_PLAIN_READER=" + reader}})
		}
	}
	results := rig.Compare(b, rig.Candidate{Name: withReader, Turn: mode("on")},
		rig.Candidate{Name: withoutReader, Turn: mode("off")})
	ratio := results.Ratio(withReader, perSecond, withoutReader, perSecond)
	table := rig.Table{
		Title: "Plain purchases in front of net/http",
		Note: fmt.Sprintf("Accepted orders, and CPU time for each in µs; medians of %d rounds. An ingress with the reader "+
			"accepts %s times as many.", b.N, ratio.Format(rig.Ratio)),
		Head: append([]string{"", "orders/s"}, rig.Roles...),
	}
	for _, name := range []string{withReader, withoutReader} {
		table.Rows = append(table.Rows, append([]string{name, results.Of(name, perSecond).Format(rig.Count)},
			results.Medians(rig.Ratio, name, rig.Roles...)...))
	}
	rig.Put(table)
	b.ReportMetric(ratio.Median, "on÷off")
}
