package limits

import (
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/bench/rig"
	"stampede/reservation"
	"stampede/reservation/catalog"
)

const (
	plainOrder   = "a sale without items"
	oneLine      = "one line"
	twoLines     = "two lines"
	soldOutSale  = "sold-out sale"
	soldOutItem  = "sold-out item, others are left"
	answersASec  = "answers/s"
	callOfScript = 64
)

// BenchmarkItems compares orders of a sale with items, and its losers, with those of a sale without.
func BenchmarkItems(b *testing.B) {
	m := reservation.Item{Code: "m", Name: "M", Stock: hugeStock}
	l := reservation.Item{Code: "l", Name: "L", Stock: hugeStock}
	batch := func() int { return callOfScript }
	server := rig.Stampede{}.Start(b, 1)
	server.StopWorkers()
	loser := losers(b, server)
	results := rig.Compare(b,
		rig.Candidate{Name: plainOrder, Turn: script(batch, 1)},
		rig.Candidate{Name: oneLine, Turn: script(batch, 1, m)},
		rig.Candidate{Name: twoLines, Turn: script(batch, 1, m, l)},
		rig.Candidate{Name: soldOutSale, Turn: loser(reservation.Terms{Stock: 1}, `{"quantity":1}`)},
		rig.Candidate{Name: soldOutItem, Turn: loser(reservation.Terms{Stock: 3, Items: []reservation.Item{
			{Code: "m", Name: "M", Stock: 1}, {Code: "l", Name: "L", Stock: 2},
		}}, `{"items":{"m":1}}`)},
	)
	table := rig.Table{
		Title: "Sales with items",
		Note: fmt.Sprintf("The reserve script with %d orders in a call, by their lines, and “sold out” of "+
			"`stampede serve` with %d connections, in one run. Medians of %d rounds.", callOfScript, crowdConnections, b.N),
		Head: []string{"", "a second", "÷ without items", "script, µs an order", "÷ without items"},
	}
	for _, row := range [][3]string{
		{plainOrder, plainOrder, perSecond},
		{oneLine, plainOrder, perSecond},
		{twoLines, plainOrder, perSecond},
		{soldOutSale, soldOutSale, answersASec},
		{soldOutItem, soldOutSale, answersASec},
	} {
		name, plain, figure := row[0], row[1], row[2]
		cells := []string{
			name, results.Of(name, figure).Format(rig.Count), results.Ratio(name, figure, plain, figure).Format(rig.Ratio),
			"", "",
		}
		if figure == perSecond {
			cells[3] = results.Of(name, scriptMicros).Format(rig.Ratio)
			cells[4] = results.Ratio(name, scriptMicros, plain, scriptMicros).Format(rig.Ratio)
		}
		table.Rows = append(table.Rows, cells)
	}
	rig.Put(table)
	b.ReportMetric(results.Ratio(twoLines, scriptMicros, plainOrder, scriptMicros).Median, "two-lines÷plain-script")
	b.ReportMetric(results.Ratio(soldOutItem, answersASec, soldOutSale, answersASec).Median, "item÷sale-sold-out")
}

// losers returns what creates a sale, sells its first unit, and has a crowd ask for it.
func losers(b *testing.B, s *rig.System) func(terms reservation.Terms, body string) turn {
	b.Helper()
	store := reservation.NewStore(s.Shop.Redis, s.Shop.Keys(1), reservation.StoreOptions{
		Logger: slog.New(slog.DiscardHandler),
	})
	b.Cleanup(store.Close)
	return func(terms reservation.Terms, body string) turn {
		terms.Name, terms.PerOrderLimit = "losers", 1
		sale, err := catalog.New(s.Shop.Pool, store).Create(b.Context(), terms)
		require.NoError(b, err)
		winner := reservation.Request{Sale: sale.ID, User: "winner", Quantity: 1}
		if len(terms.Items) > 0 {
			winner.Quantity, winner.Items = 0, map[string]int64{terms.Items[0].Code: 1}
		}
		answer, err := store.Reserve(b.Context(), winner)
		require.NoError(b, err)
		require.Equal(b, reservation.Reserved, answer.Verdict)
		return func(b *testing.B, _ int) rig.Values {
			load := s.Crowd(1)
			load.Connections, load.For, load.Status = crowdConnections, turnDuration(b), http.StatusConflict
			load.Request = requests(sale.ID, body)
			answers := s.Measure(load)
			require.Zero(b, answers.Others(), answers)
			return rig.Values{answersASec: answers.PerSecond()}
		}
	}
}

// requests of buyers who hold nothing, with this body.
func requests(sale uuid.UUID, body string) func(dst []byte, n uint64) []byte {
	length := fmt.Sprint("Content-Length: ", len(body))
	head := strings.Replace(rig.PurchaseHead(sale), "Content-Length: 14", length, 1) + "loser-"
	return func(dst []byte, n uint64) []byte {
		dst = strconv.AppendUint(append(dst, head...), n, 10)
		return append(append(dst, "\r\n\r\n"...), body...)
	}
}
