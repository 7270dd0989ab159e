package offers_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
)

// What is changed in a waiting list breaks the promise that it is about, and no other.
func TestAuditReportsEachChangeOfWaitingList(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ change, broken, says string }{
		"nothing": {},
		"two places are swapped": {
			`UPDATE draw_offers SET place = 3 - place WHERE sale_id = $1`, "D5", "and its place is",
		},
		"two turns are swapped": {
			`WITH gone AS (DELETE FROM draw_offers WHERE sale_id = $1 RETURNING *)
			INSERT INTO draw_offers (sale_id, item, rank, place, entry_id, order_id, epoch, offered_at)
			SELECT sale_id, item, 1 - rank, place, entry_id, order_id, epoch, offered_at FROM gone`,
			"D5", " is that of place 1, after place 2",
		},
		"two turns of two hours are swapped": {
			`WITH gone AS (DELETE FROM draw_offers WHERE sale_id = $1 RETURNING *)
			INSERT INTO draw_offers (sale_id, item, rank, place, entry_id, order_id, epoch, offered_at)
			SELECT sale_id, item, 1 - rank, place, entry_id, order_id, epoch, offered_at + (1 - rank) * interval '1 hour' FROM gone`,
			"D5", " is that of place 1, after place 2",
		},
		"an entry that was there had its turn late": {
			`WITH gone AS (DELETE FROM draw_offers WHERE sale_id = $1 RETURNING *),
			later AS (UPDATE order_events SET position = DEFAULT WHERE order_id = (SELECT entry_id FROM gone WHERE place = 1))
			INSERT INTO draw_offers (sale_id, item, rank, place, entry_id, order_id, epoch, offered_at)
			SELECT sale_id, item, 1 - rank, place, entry_id, order_id, epoch, offered_at + (place - 1) * interval '2 minutes' FROM gone`,
			"D5", " is that of place 1, after place 2",
		},
		"an entry that came late had its turn late": {
			`WITH gone AS (DELETE FROM draw_offers WHERE sale_id = $1 RETURNING *),
			later AS (UPDATE order_events SET position = DEFAULT WHERE order_id = (SELECT entry_id FROM gone WHERE place = 1))
			INSERT INTO draw_offers (sale_id, item, rank, place, entry_id, order_id, epoch, offered_at)
			SELECT sale_id, item, 1 - rank, place, entry_id, order_id, epoch, offered_at + (1 - rank) * interval '1 second' FROM gone`,
			"", "came to Postgres late",
		},
		"an offer has no turn": {
			`WITH gone AS (DELETE FROM draw_offers WHERE sale_id = $1 AND rank = 1),
			old AS (UPDATE orders SET updated_at = updated_at - interval '1 hour' WHERE sale_id = $1),
			log AS (UPDATE order_events SET occurred_at = occurred_at - interval '1 hour' WHERE sale_id = $1)
			UPDATE draws SET offered = 1 WHERE sale_id = $1`,
			"D5", "it is of a unit that was offered, and no turn has it",
		},
		"a place was passed over": {
			`WITH gone AS (DELETE FROM draw_offers WHERE sale_id = $1 AND rank = 0),
			moved AS (UPDATE draw_offers SET rank = 0, offered_at = now() + interval '2 minutes' WHERE rank = 1)
			UPDATE draws SET offered = 1 WHERE sale_id = $1`,
			"D5", "at place 1 was passed over: place 2 had its turn",
		},
		"a turn is gone": {
			`WITH gone AS (DELETE FROM draw_offers WHERE sale_id = $1 AND rank = 0)
			UPDATE draws SET offered = 1 WHERE sale_id = $1`,
			"D5", "ranks up to 1 had their turn, and 1 are recorded",
		},
	} {
		t.Run(name, func(t *testing.T) {
			forms(t, func(t *testing.T, s *testshop.Shop, newList func(holders ...string) *list) {
				l := newList("h1", "h2", "h3")
				l.join(t, "ann", "bob", "cid")
				l.expire(t, "h1", "h2")
				l.awaitTurns(t, offerer(t, s), "ann offered", "bob offered")
				testwork.FulfilAll(t, s)
				testwork.RequireUnbroken(t, s, uuid.Nil)
				if name == "nothing" { // places are no units
					text := testwork.Text(t, testwork.Audit(t, s, uuid.Nil))
					require.Contains(t, text, fmt.Sprintf("0 units sold and 3 to be paid, of %d\n", l.sale.Stock))
					require.Contains(t, text, "3 live as entries")
					return
				}
				for _, constraint := range []string{"draw_offers_of_entry", "draw_offers_pkey"} {
					require.NoError(t, s.Exec(t, "ALTER TABLE draw_offers DROP CONSTRAINT "+constraint))
				}
				require.NoError(t, s.Exec(t, c.change, l.sale.ID))
				report := testwork.Audit(t, s, l.sale.ID)
				var broken []string
				for _, p := range report.Promises {
					if p.Found > 0 && p.Name != "DB" {
						broken = append(broken, p.Name)
					}
				}
				text := testwork.Text(t, report)
				require.Equal(t, c.broken, strings.Join(broken, " "), text)
				require.Contains(t, text, c.says)
			})
		})
	}
}
