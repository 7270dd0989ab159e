package offers_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"stampede/draw"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/ledger/draws"
	"stampede/reservation/order"
)

// audited makes a draw of 5 units in which rank 3 was skipped because its entry was cancelled.
func audited(t *testing.T) *drawn {
	t.Helper()
	s := testshop.OnOwnRedis(t, 1)
	d := newDraw(t, s, 40, 5)
	o := d.rank(t)
	_, err := ledger.New(s.Pool).Withdraw(t.Context(), d.receipts[d.userOf(t, 3)].OrderID, "a mistake", "ada")
	require.NoError(t, err)
	for offer(t, o) > 0 {
	}
	testwork.Fulfil(t, s)
	testwork.ReleaseUnits(t, s)
	_, err = s.Catalog.PublishPending(t.Context())
	require.NoError(t, err)
	return d
}

func TestAuditOfDrawPassesEveryPromise(t *testing.T) {
	t.Parallel()
	d := audited(t)
	text := testwork.Text(t, testwork.RequireUnbroken(t, d.Shop, uuid.Nil))
	require.Contains(t, text, `
D1  each entry is in the frozen list   kept    40 entries in 1 frozen list
D2  one entry per person               kept    40 entries in 1 frozen list
D3  the list is public before its seed kept    1 list, 1 frozen, 1 ranked
D4  ranks follow from list and seed    kept    1 list, 1 frozen, 1 ranked
D5  units are offered by rank          kept    5 ranks offered, 1 skipped
D6  offered + sold ≤ stock             kept    5 units sold or to be paid, of 5
DB  `)
}

// The archive takes the entries once the goods are over; what needs them is no longer checked.
func TestAuditOfDrawWithArchivedEntries(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	d := newDraw(t, s, 20, 2, 3)
	o := d.rank(t)
	for offer(t, o) > 0 {
	}
	testwork.Fulfil(t, s)
	require.NoError(t, d.Exec(t, `WITH counted AS (UPDATE draws SET offered = offered - 1, skipped = 1 WHERE sale_id = $1)
		UPDATE draw_offers SET reason = 'already-purchased', order_id = NULL, offered_at = now() - interval '1 hour'
		WHERE sale_id = $1 AND item = 'a' AND rank = 0`, d.goods))
	_, err := s.Catalog.PublishPending(t.Context())
	require.NoError(t, err)
	require.NoError(t, d.Exec(t, "UPDATE sales SET archived_at = now() WHERE id = $1", d.entries))
	require.NoError(t, d.Exec(t, "DELETE FROM orders WHERE sale_id = $1", d.entries))
	testwork.RequireUnbroken(t, s, d.goods)
}

// What an insider changes in Postgres breaks the promise that it is about, and no other.
func TestAuditReportsEachChangeOfDraw(t *testing.T) {
	t.Parallel()
	// list changes the only chunk of the list, and makes all that follows from it fit.
	list := func(change listChange) func(*testing.T, *drawn) {
		return func(t *testing.T, d *drawn) { d.changeList(t, change) }
	}
	exec := func(statement string) func(*testing.T, *drawn) {
		return func(t *testing.T, d *drawn) { require.NoError(t, d.Exec(t, statement, d.goods)) }
	}
	frozenAt := func(at string) func(*testing.T, *drawn) {
		return exec(fmt.Sprintf(`WITH published AS (UPDATE sale_events SET data = data || '{"frozen_at": %[1]q}'
			WHERE sale_id = $1 AND type = 'DrawFrozen') UPDATE draws SET frozen_at = '%[1]s' WHERE sale_id = $1`, at))
	}
	goods := func(change string) func(*testing.T, *drawn) {
		return exec(fmt.Sprintf(`UPDATE sale_events SET data = jsonb_set(data, '{goods}', data -> 'goods' || '%s')
			WHERE sale_id = $1 AND type = 'DrawFrozen'`, change))
	}
	for name, c := range map[string]struct {
		change       func(*testing.T, *drawn)
		broken, says string
	}{
		"a record": {
			exec(`UPDATE draw_chunks SET records = set_byte(records, 40, 1 - get_byte(records, 40) % 2) WHERE sale_id = $1`), "D1",
			"place 1 of the list has not the record of its order",
		},
		"a root of a chunk": {
			exec("UPDATE draw_chunks SET hash = sha256('x') WHERE sale_id = $1"), "D1", "chunk 0 of the list, from place 0 on, has not the root",
		},
		"a root": {exec(`WITH published AS (UPDATE sale_events SET data = data || jsonb_build_object('root', encode(sha256('x'), 'hex'))
			WHERE sale_id = $1 AND type = 'DrawFrozen') UPDATE draws SET root = sha256('x') WHERE sale_id = $1`), "D1", "the list has 40 entries with the root"},
		"an entry is swapped": {list(func(ids []uuid.UUID, records []draw.Record) ([]uuid.UUID, []draw.Record) {
			ids[30], ids[31] = ids[31], ids[30]
			return ids, records
		}), "D1", "the entry is not in the list, where it belongs before place 30"},
		"an entry is removed": {list(func(ids []uuid.UUID, records []draw.Record) ([]uuid.UUID, []draw.Record) {
			return ids[:39], records[:39]
		}), "D1", "the entry is not in the list, where it belongs before place 39"},
		"an entry of nobody": {list(func(ids []uuid.UUID, records []draw.Record) ([]uuid.UUID, []draw.Record) {
			return append(ids, order.NewOrderID(ids[0])), append(records, records[0])
		}), "D1", "place 40 of the list has the order"},
		"a second entry": {func(t *testing.T, d *drawn) {
			own := d.receipts["user-1"]
			require.NoError(t, d.Exec(t, "UPDATE orders SET user_id = 'user-0', status = 'cancelled', updated_at = now() WHERE id = $1",
				own.OrderID))
			own.User = "user-0"
			d.changeList(t, func(ids []uuid.UUID, records []draw.Record) ([]uuid.UUID, []draw.Record) {
				var err error
				records[slices.Index(ids, own.OrderID)], err = draw.NewRecord(own)
				require.NoError(t, err)
				return ids, records
			})
		}, "D2", "the user has 2 entries"},
		"frozen after the round": {
			frozenAt("2023-09-15T11:00:04Z"), "D3",
			"the list was frozen at 2023-09-15T11:00:04Z, and round 657413 of its seed is of 2023-09-15T11:00:03Z",
		},
		"frozen before the end": {
			frozenAt("2023-09-15T10:58:04Z"), "D3", "the list was frozen at 2023-09-15T10:58:04Z, when the entries had not closed",
		},
		"the seed is of the future": {
			exec(`WITH published AS (UPDATE sale_events SET data = data || '{"frozen_at": "2023-09-15T11:00:01Z"}'
				WHERE sale_id = $1 AND type = 'DrawFrozen')
				UPDATE draws SET frozen_at = '2023-09-15T11:00:01Z', seeded_at = '2023-09-15T11:00:01.9Z' WHERE sale_id = $1`), "D3",
			"the seed was given at 2023-09-15T11:00:01Z, before anybody can know its round",
		},
		"published later": {
			exec("UPDATE sale_events SET type = 'DrawSeeded' WHERE sale_id = $1 AND type = 'DrawFrozen'"), "D3", "there is no event DrawFrozen",
		},
		"another time is published": {
			exec("UPDATE draws SET frozen_at = frozen_at - interval '1 second' WHERE sale_id = $1"), "D3",
			"the event DrawFrozen has a list that was frozen at 2023-09-15T11:00:02.000Z, and not a list that was frozen at 2023-09-15T11:00:01.000Z",
		},
		"it was not frozen": {
			exec(`WITH gone AS (DELETE FROM draw_offers WHERE sale_id = $1) UPDATE draws SET frozen_at = NULL, root = NULL,
				entries = NULL, seeded_at = NULL, ranked_at = NULL, offered = 0, skipped = 0 WHERE sale_id = $1`), "D3", "there is an event DrawFrozen, and the list is not frozen",
		},
		"another end of the entries": {
			exec("UPDATE sales SET closes_at = closes_at - interval '1 second' FROM draws AS d WHERE d.sale_id = $1 AND id = entries_id"), "D3",
			"the event DrawFrozen has the end of the entries at 2023-09-15T10:59:03.000Z, and not",
		},
		"another freeze": {
			exec("UPDATE draws SET freeze_seconds = 61 WHERE sale_id = $1"), "D3", "the event DrawCreated has a freeze of 60 seconds, and not a freeze of 61 seconds",
		},
		"an earlier version": {
			exec("UPDATE draws SET version = 1 WHERE sale_id = $1"), "D3", "the event DrawCreated has a draw of version 2, and not a draw of version 1",
		},
		"a seed of parties": {partiesSeed, "D3", "the event DrawCreated has the parties [], and not the parties [\"eve\" with "},
		"another published seed": {
			exec(`UPDATE sale_events SET data = data || jsonb_build_object('seed', repeat('00', 32)) WHERE sale_id = $1 AND type = 'DrawSeeded'`),
			"D4", "the seed, or what it is made of, is not that of the event DrawSeeded",
		},
		"another round": {
			exec("UPDATE draws SET freeze_seconds = 63 WHERE sale_id = $1"), "D3",
			"the seed is of round 657413, and the rule gives the last of the rounds [657414]",
		},
		"a seed":      {exec("UPDATE draws SET seed = sha256('x') WHERE sale_id = $1"), "D4", "the seed is "},
		"a signature": {exec("UPDATE draws SET signature = sha256('x') WHERE sale_id = $1"), "D4", "the seed follows from nothing"},
		"ranks": {func(t *testing.T, d *drawn) {
			exec(`UPDATE draw_ranks SET places = substring(places FROM 5 FOR 4) || substring(places FROM 1 FOR 4) || substring(places FROM 9)
				WHERE sale_id = $1`)(t, d)
			swapOffers(t, d)
		}, "D4", "rank 0 is that of place"},
		"two offers are swapped": {swapOffers, "D5", "rank 0 is that of place"},
		"a rank without a turn": {exec(`WITH gone AS (DELETE FROM draw_offers WHERE sale_id = $1 AND rank = 2)
			UPDATE draws SET offered = offered - 1 WHERE sale_id = $1`), "D5", "ranks 2 to 2 had no turn"},
		"a count": {exec("UPDATE draws SET skipped = 2 WHERE sale_id = $1"), "D5", "5 ranks were offered and 1 skipped, and the draw counts 5 and 2"},
		"another entry": {exec(`UPDATE draw_offers AS o SET entry_id = e.id FROM orders AS e JOIN draws AS d ON d.entries_id = e.sale_id
			WHERE d.sale_id = $1 AND o.sale_id = $1 AND rank = 5 AND e.id NOT IN (SELECT entry_id FROM draw_offers)`), "D5", "rank 5 names the entry"},
		"not cancelled": {
			exec(`WITH gone AS (UPDATE draws SET offered = offered - 1, skipped = skipped + 1 WHERE sale_id = $1)
			UPDATE draw_offers SET reason = 'entry-cancelled', order_id = NULL WHERE sale_id = $1 AND rank = 2`),
			"D5", "rank 2 was skipped because its entry was cancelled, which is confirmed",
		},
		"no holder": {exec(`UPDATE draw_offers SET reason = 'already-purchased', offered_at = now() - interval '1 hour'
			WHERE sale_id = $1 AND rank = 3`), "D5", "rank 3 was skipped because the user has an order, and there is none"},
		"a holder of an offer": {
			exec(`WITH gone AS (UPDATE draws SET offered = offered - 1, skipped = skipped + 1 WHERE sale_id = $1)
			UPDATE draw_offers SET reason = 'already-purchased', order_id = NULL WHERE sale_id = $1 AND rank = 2`),
			"D5", "rank 2 was skipped because the user has an order, and had none when the list was frozen",
		},
		"units that were not there": {
			goods(`{"stock": 6}`), "D3", "the event DrawFrozen has at revision 2 6 units, of which [0] were sold to entrants at " +
				"the places [] and to others, and not at revision 2 5 units",
		},
		"items that were not there": {goods(`{"items": [{"code": "x", "stock": 5}]}`), "D3", `5 units ("x" 5),`},
		"orders that were not there": {
			goods(`{"sold": 2}`), "D3", "the event DrawFrozen has 2 units that were sold before, and orders have 0",
		},
		"a holder that was none": {
			goods(`{"holders": [3]}`), "D3", "the event DrawFrozen has an order of the entrant at place 3, and there is none",
		},
		"no units": {
			exec("UPDATE sale_events SET data = data - 'goods' WHERE sale_id = $1 AND type = 'DrawFrozen'"), "D3",
			"the event DrawFrozen has no goods, and not at revision 0 5 units",
		},
		"a winner is skipped": {
			func(t *testing.T, d *drawn) {
				_, err := ledger.New(d.Pool).Withdraw(t.Context(), d.receipts[d.userOf(t, 2)].OrderID, "a mistake", "eve")
				require.NoError(t, err)
				exec(`WITH won AS (UPDATE draws SET offered = offered - 1, skipped = skipped + 1 WHERE sale_id = $1)
					UPDATE draw_offers SET reason = 'entry-cancelled', order_id = NULL WHERE sale_id = $1 AND rank = 2`)(t, d)
			}, "D5", "rank 2 was skipped because its entry was cancelled, and it was offered: the user has the order",
		},
		"a reason": {exec("UPDATE draw_offers SET reason = 'a cousin' WHERE sale_id = $1 AND rank = 3"), "D5", "rank 3 was skipped for the unknown reason a cousin"},
		"a void draw": {
			exec("UPDATE draws SET voided_at = now() WHERE sale_id = $1"), "D5", "ranks of a void draw were offered",
		},
		"more offers than units": {
			func(t *testing.T, d *drawn) {
				entries := d.receipts[d.userOf(t, 6)]
				proof, err := d.Proof(t.Context(), d.goods, entries)
				require.NoError(t, err)
				require.NoError(t, d.Exec(t, `INSERT INTO draw_offers (sale_id, rank, place, entry_id, order_id, epoch)
					VALUES ($1, 6, $2, $3, $4, 1)`, d.goods, proof.Place, entries.OrderID, order.NewOrderID(d.goods)))
				exec("UPDATE draws SET offered = offered + 1 WHERE sale_id = $1")(t, d)
			},
			"D6", "5 units are sold and 1 more are offered, of a stock of 5",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := audited(t)
			c.change(t, d)
			report := testwork.Audit(t, d.Shop, d.goods)
			text := testwork.Text(t, report)
			var broken []string
			for _, p := range report.Promises {
				if p.Found > 0 {
					broken = append(broken, p.Name)
				}
			}
			require.Equal(t, []string{c.broken}, broken, text)
			require.Contains(t, text, c.says)
		})
	}
}

// partiesSeed makes the draw one of a party that has chosen its secret, and all that is later fit.
func partiesSeed(t *testing.T, d *drawn) {
	t.Helper()
	secret := bytes.Repeat([]byte{7}, 32)
	sum := sha256.Sum256(secret)
	parties := []draw.Party{{Name: "eve", Commitment: sum[:], Secret: secret}}
	seed, err := draw.PartiesSeed(draw.Version, d.goods, d.find(t).Root, parties)
	require.NoError(t, err)
	batch := new(pgx.Batch)
	batch.Queue("DELETE FROM draw_offers")
	batch.Queue(`UPDATE draws SET parties = $1, seed = $2, round = NULL, signature = NULL, ranked_at = NULL, offered = 0, skipped = 0`,
		parties, seed[:])
	batch.Queue("UPDATE sale_events SET data = data - 'rounds' || jsonb_build_object('parties', $1::jsonb) WHERE type = 'DrawFrozen'", parties)
	batch.Queue("UPDATE sale_events SET data = $1 WHERE type = 'DrawSeeded'", draw.Seeded{Seed: seed[:], Parties: parties})
	require.NoError(t, d.Pool.SendBatch(t.Context(), batch).Close())
}

// swapOffers swaps the places of the ranks 0 and 1.
func swapOffers(t *testing.T, d *drawn) {
	t.Helper()
	require.NoError(t, d.Exec(t, "ALTER TABLE draw_offers DROP CONSTRAINT draw_offers_of_entry"))
	require.NoError(t, d.Exec(t, `UPDATE draw_offers AS o SET place = other.place, entry_id = other.entry_id, order_id = other.order_id
		FROM draw_offers AS other WHERE o.sale_id = $1 AND other.sale_id = $1 AND o.rank + other.rank = 1`, d.goods))
	require.NoError(t, d.Exec(t, "ALTER TABLE draw_offers ADD CONSTRAINT draw_offers_of_entry UNIQUE (sale_id, entry_id)"))
}

// listChange returns another list.
type listChange func(ids []uuid.UUID, records []draw.Record) ([]uuid.UUID, []draw.Record)

// changeList changes the list, and makes the root fit, here and where it was published. The ranks go.
func (d *drawn) changeList(t *testing.T, change listChange) {
	t.Helper()
	var rawIDs, rawRecords []byte
	require.NoError(t, d.Pool.QueryRow(t.Context(), "SELECT ids, records FROM draw_chunks").Scan(&rawIDs, &rawRecords))
	var ids []uuid.UUID
	var records []draw.Record
	for n := range len(rawIDs) / 16 {
		ids, records = append(ids, uuid.UUID(rawIDs[16*n:])), append(records, draw.Record(rawRecords[draw.RecordBytes*n:]))
	}
	ids, records = change(ids, records)
	var tree draw.Tree
	rawIDs, rawRecords = nil, nil
	for n := range ids {
		tree.Add(records[n].Leaf())
		rawIDs, rawRecords = append(rawIDs, ids[n][:]...), append(rawRecords, records[n][:]...)
	}
	root := tree.Root()
	batch := new(pgx.Batch)
	batch.Queue("UPDATE draw_chunks SET ids = $1, records = $2, hash = $3", rawIDs, rawRecords, root[:])
	batch.Queue("DELETE FROM draw_offers")
	batch.Queue("UPDATE draws SET root = $1, entries = $2, ranked_at = NULL, offered = 0, skipped = 0", root[:], len(ids))
	batch.Queue(`UPDATE sale_events SET data = data || jsonb_build_object('root', $1::text, 'entries', $2::int)
		WHERE type = 'DrawFrozen'`, fmt.Sprintf("%x", root[:]), len(ids))
	require.NoError(t, d.Pool.SendBatch(t.Context(), batch).Close())
}

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

// An entry that is cancelled just when the entries close is either not in the list or cancelled after the end. An
// entrant cannot do so after the end, and an operator can.
func TestEntryIsCancelledAtTheEnd(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		cancel func(context.Context, *ledger.Ledger, uuid.UUID) error
		want   error
	}{
		"by its entrant": {func(ctx context.Context, l *ledger.Ledger, id uuid.UUID) error {
			_, err := l.Cancel(ctx, id, user(0))
			return err
		}, order.ErrIllegalTransition},
		"by an operator": {func(ctx context.Context, l *ledger.Ledger, id uuid.UUID) error {
			_, err := l.Withdraw(ctx, id, "a mistake", "ada")
			return err
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			s := testshop.OnOwnRedis(t, 1)
			d := newDraw(t, s, 2, 1)
			testwork.Fulfil(t, s)
			close := "UPDATE sales SET closes_at = clock_timestamp() + make_interval(secs => $2) WHERE id = $1"
			require.NoError(t, s.Exec(t, close, d.entries, 3600))
			held := s.HoldSale(t, d.entries)
			done := make(chan error, 1)
			go func() { done <- c.cancel(ctx, ledger.New(s.Pool), d.receipts[user(0)].OrderID) }()
			s.AwaitWaiting(t, 1)
			_, err := held.Exec(ctx, close, d.entries, 0) // after the change of the order began
			require.NoError(t, err)
			require.NoError(t, held.Commit(ctx))
			require.ErrorIs(t, <-done, c.want)

			testwork.ReleaseUnits(t, s)
			o := offerer(t, s)
			require.NoError(t, o.Prepare(ctx))
			d.seed(t)
			require.NoError(t, o.Prepare(ctx))
			require.Equal(t, int64(2), d.find(t).Entries, "the entry was live at the end")
			for offer(t, o) > 0 {
			}
			require.Contains(t, []draws.State{draws.Offering, draws.Over}, d.find(t).State)
			d.requireUnbroken(t)
		})
	}
}
