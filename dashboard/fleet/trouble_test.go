package fleet

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/draw"
	"stampede/internal/clocks"
	"stampede/internal/redisinfo"
	"stampede/ledger/draws"
	"stampede/reservation"
)

// healthy is a fleet in which nothing is wrong, and its snapshot.
func healthy() (*Fleet, *Snapshot, round) {
	f := &Fleet{}
	f.records.at = noon
	f.processes = []*process{{up: true, name: "http://one/metrics", last: &sample{ingress: true, worker: true}}}
	s := &Snapshot{
		At: noon, Postgres: Server{Reachable: true}, Redis: Server{Reachable: true},
		Processes: []Process{{Target: "http://one/metrics", Kind: "ingress, worker", Up: true}},
		Rates:     Rates{BacklogKnown: true}, Audit: &Audit{At: at(-3600)},
		Sales: []Sale{{ID: uuid.UUID{1}, Terms: reservation.Terms{Name: "shoes"}, State: reservation.StateOpen}},
	}
	return f, s, round{gained: &increase{}, streams: map[string]streamSample{"a": {known: true, reads: true}}}
}

func TestEachTroubleIsFound(t *testing.T) {
	t.Parallel()
	f, s, r := healthy()
	f.troubles.update(f, s, r)
	require.Empty(t, s.Troubles)

	for name, test := range map[string]struct {
		change func(f *Fleet, s *Snapshot, r *round)
		want   *kind
		text   string
		lasts  time.Duration // how long it must last to be shown
	}{
		"shed": {func(_ *Fleet, s *Snapshot, r *round) {
			r.gained.overloaded, s.Rates.Offered = 30, 100
		}, purchasesShed, "30 of 100", 0},
		"fail": {func(_ *Fleet, s *Snapshot, _ *round) {
			s.Rates.Failed, s.Rates.Offered = 3, 100
		}, purchasesFail, "3 of 100", 0},
		"waits": {func(_ *Fleet, s *Snapshot, _ *round) {
			s.Rates.OldestWaiting = 31 * time.Second
		}, orderWaits, "31s", 0},
		"no worker answers": {func(_ *Fleet, s *Snapshot, _ *round) {
			s.Processes[0].Kind = "ingress"
			s.Processes = append(s.Processes, Process{Kind: "worker"})
		}, noWorker, "none answers", 0},
		"no reader": {func(_ *Fleet, _ *Snapshot, r *round) {
			r.streams["b"] = streamSample{known: true}
		}, noWorker, "stream b", delayedReader},
		"no reader, and why": {func(f *Fleet, s *Snapshot, r *round) {
			f.processes[0].last = mustRead(t, workerPage(1, 0, 0, 0, "a")+
				"stampede_worker_partitions{idle=\"ann reads it\"} 0\n")
			s.Processes[0] = f.processes[0].shown()
			s.Processes[0].Kind = "ingress, worker"
			r.streams["b"] = streamSample{known: true}
		}, noWorker, "stream b; of http://one/metrics: ann reads it", delayedReader},
		"failing step": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.processes[0].last.failing = []string{"record"}
		}, stepFails, "record", delayedStep},
		"one name": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.processes[0].last.failing = []string{stepName}
		}, stepFails, "another worker has the name of http://one/metrics", delayedStep},
		"two secrets": {func(f *Fleet, _ *Snapshot, _ *round) {
			for _, secret := range []string{"aa", "aa", "bb"} {
				page := ingressPage(1, 0, 0, 0, 0) + "stampede_receipt_secret_info{fingerprint=\"" + secret + "\"} 1\n"
				p := &process{up: true, name: "http://" + secret + "/metrics", last: mustRead(t, page)}
				f.processes = append(f.processes, p)
			}
		}, receiptsRefused, "refuse each other's: http://aa/metrics, http://bb/metrics", 0},
		"dead letter": {func(_ *Fleet, s *Snapshot, _ *round) {
			s.DeadLetters = 1234
		}, deadLetterParked, "1,234", 0},
		"rejected": {func(_ *Fleet, _ *Snapshot, r *round) {
			r.ended.rejected = 2
		}, orderRejected, "2 orders", 0},
		"voided": {func(_ *Fleet, _ *Snapshot, r *round) { r.ended.voided = 2 }, orderVoided, "2 orders", 0},
		"rebuilt": {func(_ *Fleet, _ *Snapshot, r *round) {
			r.ended.rebuilds = map[string]bool{"refused": true}
		}, stockRebuilt, "Postgres refused an order", 0},
		"shut": {func(_ *Fleet, s *Snapshot, _ *round) {
			s.Sales[0].Shut = "a reason"
		}, saleShut, "shoes: a reason", delayedShut},
		"target gone": {func(_ *Fleet, s *Snapshot, _ *round) {
			s.Processes = append(s.Processes, Process{Target: "http://two/metrics", Kind: "relay", Error: "refused"})
		}, targetGone, "relay http://two/metrics is gone: refused", 0},
		"no ingress": {func(_ *Fleet, s *Snapshot, _ *round) {
			s.Processes[0].Kind = "worker"
			s.Processes = append(s.Processes, Process{Kind: "ingress"})
		}, noIngress, "none answers", 0},
		"Postgres": {func(_ *Fleet, s *Snapshot, _ *round) {
			s.Postgres = Server{Error: "refused"}
		}, postgresGone, "refused", 0},
		"read-only Postgres": {func(f *Fleet, s *Snapshot, _ *round) {
			s.Postgres.Reachable, f.records.readOnly = true, true
		}, postgresGone, "takes no writes", 0},
		"Redis": {func(_ *Fleet, s *Snapshot, _ *round) {
			s.Redis = Server{Error: "refused"}
		}, redisGone, "refused", 0},
		"audit is old": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.records.auditedSince = noon.Add(-50 * time.Hour)
		}, auditOld, "50 hours", 0},
		"never audited": {func(f *Fleet, s *Snapshot, _ *round) {
			s.Audit, f.records.auditedSince = nil, noon.Add(-25*time.Hour)
		}, auditOld, "none was ever", 0},
		"broken": {func(_ *Fleet, s *Snapshot, _ *round) {
			s.Audit.Broken = []string{"S1", "S4"}
		}, promiseBroken, "S1, S4", 0},
		"relay lags": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.processes[0].last.relayTargets = map[string]relaySample{"shop": {lag: 61}}
		}, relayLags, "shop is 1m1s behind", 0},
		"relay fails": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.processes[0].last.relayTargets = map[string]relaySample{"shop": {failing: 6}}
		}, relayLags, "6 times", 0},
		"relay disabled": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.processes[0].last.relayTargets = map[string]relaySample{"shop": {disabled: true}}
		}, relayLags, "disabled", 0},
		"relay paused": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.processes[0].last = mustRead(t, workerPage(1, 0, 0, 0, "a")+"stampede_relay_lag_seconds{target=\"shop\"} 61\n"+
				"stampede_relay_target_state{target=\"shop\",state=\"paused\"} 1\n")
		}, relayLags, "shop is paused, and 1m1s behind", 0},
		"relay held": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.processes[0].last.relayTargets = map[string]relaySample{"shop": {held: 31}}
		}, relayLags, "transaction", 0},
		"operators' file": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.processes[0].last.operatorsFile = true
		}, operatorsFile, "http://one/metrics", 0},
		"no keys": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.processes[0].last = mustRead(t, ingressPage(1, 0, 0, 0, 0)+
				"stampede_key_set_keys{state=\"usable\"} 0\nstampede_key_set_keys{state=\"ignored\"} 3\nstampede_key_set_current 0\n")
		}, keySetGone, "with no usable key", delayedShut},
		"old keys": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.processes[0].last = mustRead(t, ingressPage(1, 0, 0, 0, 0)+
				"stampede_key_set_keys{state=\"usable\"} 2\nstampede_key_set_current 0\n")
		}, keySetOld, "http://one/metrics has 2 old keys", delayedKeySet},
		"ingress without Redis": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.processes[0].last = mustRead(t, ingressPage(1, 0, 0, 0, 0)+"stampede_ready{process=\"ingress\",reason=\"Redis is away\"} 0\n")
		}, notReady, "http://one/metrics: Redis is away", delayedReader},
		"no ingress is ready": {func(_ *Fleet, s *Snapshot, _ *round) {
			s.Processes[0].NotReady = "Redis is away"
		}, noIngress, "Redis is away", delayedShut},
		"worker without servers": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.processes[0].last = mustRead(t, workerPage(1, 0, 0, 0, "a")+"stampede_postgres_up 0\nstampede_redis_up 1\n")
		}, postgresGone, "it does not answer http://one/metrics", delayedReader},
		"worker without Redis": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.processes[0].last = mustRead(t, workerPage(1, 0, 0, 0, "a")+
				"stampede_redis_up{node=\"a\"} 1\nstampede_redis_up{node=\"b\"} 0\nstampede_redis_up{node=\"c\"} 1\n")
		}, redisGone, "it does not answer http://one/metrics", delayedReader},
		"old guard": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.processes[0].last = mustRead(t, workerPage(1, 0, 0, 0, "a")+
				"stampede_guard_age_seconds{of=\"worker\"} 61\nstampede_guard_age_seconds{of=\"ingress\"} 1\n")
		}, guardOld, "for 1m1s", 0},
		"set aside": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.processes[0].last = mustRead(t, workerPage(1, 0, 0, 0, "a")+"stampede_orders_set_aside 2\n")
		}, orderSetAside, "2 overdue orders", 0},
		"releases": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.processes[0].last = mustRead(t, workerPage(1, 0, 0, 0, "a")+"stampede_releases_pending 2\n")
		}, releasesWait, "2 ended orders", delayedReleases},
		"refunds": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.processes[0].last = mustRead(t, workerPage(1, 0, 0, 0, "a")+"stampede_refunds_due{currency=\"EUR\"} 2\n"+
				"stampede_refunds_due{currency=\"none\"} 1\nstampede_refunds_due_age_seconds 108001\n")
		}, refundDue, "3 payments have to be paid back, the oldest for 30 hours", 0},
		"payments": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.processes[0].last = mustRead(t, workerPage(1, 0, 0, 0, "a")+
				"stampede_payments_waiting 2\nstampede_payments_waiting_age_seconds 901\n")
		}, paymentWaits, "the oldest of 2 has waited for 15m1s", 0},
		"unclear": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.processes[0].last = mustRead(t, workerPage(1, 0, 0, 0, "a")+
				"stampede_payments_unclear 2\nstampede_payments_unclear_age_seconds 7260\n")
		}, paymentUnclear, "2 wait for somebody to look, the oldest for 2h1m0s", 0},
		"wrong token": {func(_ *Fleet, _ *Snapshot, r *round) {
			r.money = money{{moneyReported, reportUnauthorized}: 5, {moneyReported, reportKept}: 10}
		}, paymentsRefused, "5 of 15 reports in two minutes have a token", 0},
		"wrong amounts": {func(_ *Fleet, _ *Snapshot, r *round) {
			r.money = money{{moneyDue, "amount-mismatch"}: 5, {kind: moneySettled}: 90}
		}, paymentsRefused, "5 of 95 payments in two minutes are due for refund: amount-mismatch", 0},
		"late freeze": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.draws.found = []draws.Watched{{Name: "Air <One>", At: noon, Draw: draws.Draw{
				State: draws.Freezing, ClosesAt: at(-90), Freeze: 2 * time.Minute,
			}}}
		}, drawWaits, "Air <One>: its list is not frozen, and in 4m3", 0},
		"missing secret": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.draws.found = []draws.Watched{{Name: "Air One", At: noon, Draw: draws.Draw{
				State: draws.Frozen, FrozenAt: at(-3000), RevealBy: at(600),
				Parties: []draw.Party{{Name: "club", Secret: draw.Hex{1}}, {Name: "notary"}},
			}}}
		}, drawWaits, "no secret of notary, and in 10m0s the draw is void", 0},
		"missing round": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.draws.found = []draws.Watched{{Name: "Air One", At: noon, Draw: draws.Draw{
				State: draws.Frozen, FrozenAt: at(-3000), Rounds: []int64{draw.RoundAt(at(-2160))},
			}}}
		}, drawWaits, "which is public for 3", 0},
		"no ranks": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.draws.found = []draws.Watched{{Name: "Air One", At: noon, Draw: draws.Draw{
				State: draws.Ranking, SeededAt: at(-360),
			}}}
		}, drawWaits, "no worker has ranked its entries for 6m0s", 0},
		"void draw": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.draws.found = []draws.Watched{{Name: "Air One", Draw: draws.Draw{
				State: draws.Void, VoidedAt: at(-5), VoidReason: "late",
			}}}
		}, drawVoid, "Air One: late", 0},
		"unanswered offers": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.draws.found = []draws.Watched{{
				Name: "Air One", Draw: draws.Draw{State: draws.Offering}, Offers: draws.Offers{Expired: 12, Answered: 8},
			}}
		}, offersUnanswered, "12 of its latest 20 offers expired", 0},
		"no relay": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.unserved = 6 * time.Second
		}, noRelay, "its events have waited for 6s", delayedReader},
		"disputed": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.processes[0].last = mustRead(t, workerPage(1, 0, 0, 0, "a")+"stampede_payments_disputed 1\n")
		}, paymentDisputed, "1 payment is disputed", 0},
		"lost entries": {func(_ *Fleet, _ *Snapshot, r *round) { r.ended.lost = 3 }, entryLost, "3 entries", 0},
		"log is off": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.nodes = []node{{Server: redisinfo.Server{Name: "a:1"}}}
		}, redisNoLog, "of a:1 is off", delayedReader},
		"memory": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.nodes = []node{{Server: redisinfo.Server{Name: "a:1", LogOn: true, UsedBytes: 81, MaxBytes: 100}}}
		}, redisFills, "81 %", 0},
		"no memory": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.nodes = []node{
				{Server: redisinfo.Server{Name: "a:1", LogOn: true, UsedBytes: 96, MaxBytes: 100}},
				{Server: redisinfo.Server{LogOn: true, UsedBytes: 1 << 40}},
			}
		}, redisFull, "96 %", 0},
		"log fails": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.nodes = []node{{Server: redisinfo.Server{Name: "a:1", LogOn: true, LogFails: true}}}
		}, redisNoLog, "cannot write", 0},
		"clock of Redis": {func(f *Fleet, _ *Snapshot, _ *round) {
			ahead := &clocks.Reading{Offset: 3 * time.Second}
			f.nodes = []node{{Server: redisinfo.Server{Name: "a:1", LogOn: true, Clock: ahead}}}
			f.records.clock = clocks.Reading{Offset: 5 * time.Second, Margin: time.Millisecond}
		}, clocksApart, "that of a:1 is 1.999s behind that of Postgres", 0},
		"clock of a process": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.processes[0].last = mustRead(t, workerPage(1, 0, 0, 0, "a")+"stampede_clock_ahead_seconds 1.5\n")
		}, clocksApart, "that of http://one/metrics is 1.5s ahead of that of Postgres", 0},
		"clock of a process is behind": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.processes[0].last = mustRead(t, workerPage(1, 0, 0, 0, "a")+"stampede_clock_ahead_seconds -1.5\n")
		}, clocksApart, "that of http://one/metrics is 1.5s behind that of Postgres", 0},
		"log is slow": {func(f *Fleet, _ *Snapshot, _ *round) {
			f.noteNodes([]redisinfo.Server{{Name: "a:1", LogOn: true, DelayedSyncs: 3}}, at(-9))
			f.noteNodes([]redisinfo.Server{{Name: "a:1", LogOn: true, DelayedSyncs: 4}}, at(-5))
		}, redisSlow, "has delayed purchases", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, s, r := healthy()
			test.change(f, s, &r)
			f.troubles.update(f, s, r)
			require.Equal(t, test.lasts == 0, s.IsSettled(at(1000)))
			if test.lasts > 0 {
				require.Empty(t, s.Troubles)
				require.Len(t, s.Pending, 1)
				require.Equal(t, test.want.name, s.Pending[0].Name)
				require.Equal(t, noon.Add(test.lasts), s.Pending[0].Due)
				require.True(t, s.IsSettled(noon.Add(test.lasts)), "it takes too long")
				s.At = noon.Add(test.lasts)
				f.troubles.update(f, s, r)
			}
			require.Len(t, s.Troubles, 1)
			require.Empty(t, s.Pending)
			found := s.Troubles[0]
			require.Equal(t, test.want.name, found.Name)
			require.Equal(t, test.want.severity, found.Severity)
			require.Contains(t, found.Text, test.want.summary+": ")
			require.Contains(t, found.Text, test.text)
		})
	}
}

func TestBacklogThatGrowsIsTrouble(t *testing.T) {
	t.Parallel()
	f, s, r := healthy()
	grows := func(seconds int, backlog int64) bool {
		s.At, s.Troubles, s.Rates.Backlog = at(float64(seconds)), nil, backlog
		f.troubles.update(f, s, r)
		return slices.Contains(troubleNames(s), backlogGrows.name)
	}
	for i := range backlogFor {
		require.False(t, grows(i, int64(100*i)), "it must last")
		require.Equal(t, 100*i < backlogLeast, s.IsSettled(at(backlogFor+1)))
	}
	require.True(t, grows(backlogFor, 100*backlogFor))
	for i := range 2 * backlogFor {
		grows(backlogFor+1+i, 3000)
	}
	require.False(t, grows(100, 3000), "it is the same")
	require.False(t, grows(101, 10), "it is done")
}

func TestTroubleLastsUntilItIsOver(t *testing.T) {
	t.Parallel()
	f, s, r := healthy()
	update := func(seconds float64, failed float64, voided float64) []Trouble {
		s.At, s.Troubles, s.Rates.Failed, r.ended.voided = at(seconds), nil, failed, voided
		f.troubles.update(f, s, r)
		return s.Troubles
	}
	update(0, 1, 0)
	found := update(5, 0, 0)
	require.Len(t, found, 1, "it comes and goes")
	require.Equal(t, noon, found[0].Since)
	update(9, 2, 0)
	require.Equal(t, noon, update(15, 0, 0)[0].Since)
	require.Empty(t, update(20, 0, 0))
	require.Equal(t, at(30), update(30, 1, 0)[0].Since, "another one")

	update(50, 0, 3)
	found = update(60, 0, 4)
	require.Contains(t, found[0].Text, "7 orders")
	require.Equal(t, at(50), found[0].Since)
	require.Empty(t, update(60+holdEnds.Seconds()+1, 0, 0))
	require.Contains(t, update(900, 0, 1)[0].Text, "1 order is voided")
}

// Strangers, and a few payments that come too late, are no trouble. What was reported before two minutes does not
// count.
func TestFewWrongPaymentsAreNoTrouble(t *testing.T) {
	t.Parallel()
	f, s, _ := healthy()
	update := func(second float64, fresh money) []string {
		s.At, s.Troubles = at(second), nil
		f.troubles.update(f, s, round{gained: &increase{}, money: fresh})
		return troubleNames(s)
	}
	unauthorized, kept := moneyKey{moneyReported, reportUnauthorized}, moneyKey{moneyReported, reportKept}
	due, settled := moneyKey{moneyDue, "order-expired"}, moneyKey{kind: moneySettled}
	require.Empty(t, update(0, money{unauthorized: 4, due: 4}), "the only ones")
	require.Empty(t, update(1, money{kept: 96, settled: 96}))
	require.Empty(t, update(2, money{unauthorized: 26, due: 1}), "three in ten, one in twenty")
	require.Equal(t, []string{paymentsRefused.name}, update(3, money{unauthorized: 60}))
	require.Equal(t, []string{paymentsRefused.name}, update(119, money{}))
	require.Empty(t, update(124, money{}))
}

// A process that restarts counts from zero, and what strangers report counts for nothing.
func TestPaymentsAreRead(t *testing.T) {
	t.Parallel()
	page := func(kept int) *sample {
		return mustRead(t, ingressPage(1, 0, 0, 0, 0)+fmt.Sprintf(`# TYPE stampede_payment_reports_total counter
stampede_payment_reports_total{by="shop",outcome="anonymous"} 900
stampede_payment_reports_total{by="shop",outcome="kept"} %d
stampede_payment_reports_total{by="stripe",outcome="kept"} 7
stampede_payment_reports_total{by="shop",outcome="invalid"} 2
# TYPE stampede_payments_total counter
stampede_payments_total{state="settled",reason=""} 5
stampede_payments_total{state="claimed",reason="order-expired"} 90
stampede_payments_total{state="refund_due",reason="order-cancelled"} 90
stampede_payments_total{state="refund_due",reason="order-expired"} 3
`, kept))
	}
	require.Equal(t, MoneyRates{Reported: 12, Refused: 2, Settled: 5, Due: 3, Known: true},
		page(3).money.since(nil).rates(true))
	require.Equal(t, money{{moneyReported, reportKept}: 7}, page(0).money.since(page(8).money))
}

func TestWorstTroubleComesFirst(t *testing.T) {
	t.Parallel()
	f, s, r := healthy()
	s.DeadLetters, s.Rates.Failed = 1, 1
	f.records.oldestLetter = at(-1000)
	s.Postgres = Server{Reachable: true}
	s.Redis = Server{Error: "refused", Since: at(-10)}
	f.troubles.update(f, s, r)
	require.Equal(t, []string{redisGone.name, deadLetterParked.name}, troubleNames(s))
	under := s.Troubles[0].Consequences
	require.Len(t, under, 1)
	require.Equal(t, purchasesFail.name, under[0].Name)
	for _, trouble := range append(s.Troubles, under...) {
		require.False(t, strings.HasSuffix(trouble.Text, "."))
	}
}

// An outage of Redis and its consequences, some of which have causes among themselves.
func TestConsequencesStandUnderTheirCause(t *testing.T) {
	t.Parallel()
	f, s, r := healthy()
	s.Processes = append(s.Processes, Process{Target: "http://relay/metrics", Kind: "relay", Error: "refused"})
	s.Processes[0].NotReady, f.processes[0].last.notReady = "Redis is away", "Redis is away"
	s.Sales[0].Shut, s.Rates.Failed, f.processes[0].last.failing = "Redis is away", 1, []string{"expire", "record"}
	update := func(redis Server) {
		for _, second := range []float64{0, 60} { // all of them last
			s.At, s.Redis = at(second), redis
			f.troubles.update(f, s, r)
		}
	}
	update(Server{Error: "refused", Since: at(-1)})
	require.Equal(t, []string{redisGone.name, targetGone.name}, troubleNames(s),
		"the relay has not ended because of Redis")
	names := troubleNames(&Snapshot{Troubles: s.Troubles[0].Consequences})
	require.ElementsMatch(t, []string{
		noIngress.name, notReady.name, saleShut.name, purchasesFail.name, stepFails.name,
	}, names)

	f.troubles.known, s.Audit.Broken = nil, []string{"S4"}
	update(Server{Reachable: true})
	require.Equal(t, []string{promiseBroken.name, noIngress.name, targetGone.name, stepFails.name}, troubleNames(s))
	require.ElementsMatch(t, []string{notReady.name, saleShut.name, purchasesFail.name},
		troubleNames(&Snapshot{Troubles: s.Troubles[1].Consequences}), "also what is under its consequences")
}

// What only one process or node misses explains nothing of the others, and a node that is down is one trouble.
func TestTroubleOfOneExplainsNothing(t *testing.T) {
	t.Parallel()
	f, s, r := healthy()
	f.processes[0].last.redisGone, f.processes[0].last.postgresGone = true, true
	s.Rates.OldestWaiting, s.Processes[0].NotReady = time.Hour, "it ends"
	r.gained.overloaded, s.Rates.Offered = 30, 100
	update := func(second float64) {
		s.At = at(second)
		f.troubles.update(f, s, r)
		for _, trouble := range s.Troubles {
			require.Empty(t, trouble.Consequences, trouble.Text)
		}
	}
	update(0)
	update(60)
	found := []string{postgresGone.name, redisGone.name, orderWaits.name, noIngress.name, purchasesShed.name}
	require.ElementsMatch(t, found, troubleNames(s))
	f.nodes = []node{{Server: redisinfo.Server{Name: "a:1", Err: errNotStampede}, health: server{err: "refused"}}}
	update(61)
	require.ElementsMatch(t, found, troubleNames(s), "RedisGone is that of the node")
}

// What a process does not reach explains what it cannot do, and what others cannot is another trouble.
func TestProcessExplainsItsOwnSteps(t *testing.T) {
	t.Parallel()
	for cause, gone := range map[*kind]sample{
		postgresGone: {postgresGone: true}, redisGone: {redisGone: true}, notReady: {notReady: "Redis does not answer"},
	} {
		f, s, r := healthy()
		if gone.worker = gone.notReady == ""; gone.worker {
			gone.failing = []string{"expire"}
		}
		gone.guardAge = guardAgeMax + 1
		f.processes = append(f.processes, &process{up: true, url: "two", name: "two", last: &gone})
		found := func(second float64) []string {
			s.At = at(second)
			f.troubles.update(f, s, r)
			return troubleNames(s)
		}
		require.Equal(t, []string{guardOld.name}, found(0), "nothing else lasts yet")
		if gone.worker {
			require.Equal(t, []string{cause.name}, found(delayedStep.Seconds()), "before its consequence")
		}
		require.Equal(t, []string{cause.name}, found(60))
		require.Contains(t, troubleNames(&Snapshot{Troubles: s.Troubles[0].Consequences}), guardOld.name)
		require.Equal(t, gone.worker, len(s.Troubles[0].Consequences) == 2)
		f.processes[0].last.failing = []string{"record"}
		found(61)
		require.Contains(t, found(70), stepFails.name, "of another process")
	}
}

func TestRejectedOrderExplainsItsRebuildOnly(t *testing.T) {
	t.Parallel()
	f, s, r := healthy()
	r.ended.rejected, r.ended.rebuilds = 1, map[string]bool{"refused": true, "server": true}
	f.troubles.update(f, s, r)
	require.Equal(t, []string{orderRejected.name, stockRebuilt.name}, troubleNames(s))
	require.Contains(t, s.Troubles[0].Consequences[0].Text, "Postgres refused")
}

// Purchases fail because one ingress cannot use Redis: that is said at once, and with the urgency of its consequence.
func TestIngressExplainsItsFailures(t *testing.T) {
	t.Parallel()
	f, s, r := healthy()
	other := &process{up: true, url: "two", name: "two", last: &sample{ingress: true}, gained: increase{seconds: 1}}
	other.last.notReady = "Redis does not answer"
	f.processes = append(f.processes, other)
	update := func(failedHere, failedThere float64) []Trouble {
		f.processes[0].gained = increase{seconds: 1, purchases: outcomes{failed: failedHere}}
		other.gained.purchases[failed] = failedThere
		s.Rates.Failed, s.Rates.Offered = failedHere+failedThere, 100
		f.troubles.update(f, s, r)
		return s.Troubles
	}
	s.DeadLetters, f.records.oldestLetter = 1, at(-1000)
	found := update(1, 30)
	require.Equal(t, []string{notReady.name, deadLetterParked.name}, troubleNames(s), "the worst first")
	require.Equal(t, Warning, found[0].Severity)
	require.Equal(t, purchasesFail.name, found[0].Consequences[0].Name)
	update(2, 30)
	require.Equal(t, []string{purchasesFail.name, deadLetterParked.name}, troubleNames(s),
		"others fail where the ingress is ready")
	s.Redis = Server{Error: "refused"}
	update(0, 30)
	require.Equal(t, []string{redisGone.name, deadLetterParked.name}, troubleNames(s), "it explains both")
}

func TestTroubleThatChanges(t *testing.T) {
	t.Parallel()
	f, s, r := healthy()
	update := func(second float64, shut string, used int64) []Trouble {
		s.At, s.Sales[0].Shut = at(second), shut
		f.nodes = []node{{Server: redisinfo.Server{Name: "a:1", LogOn: true, UsedBytes: used, MaxBytes: 100}}}
		f.troubles.update(f, s, r)
		return s.Troubles
	}
	update(0, "its stock is being rebuilt: reading", 10)
	found := update(3, "its stock is being rebuilt: writing", 10)
	require.Len(t, found, 1, "a step is no new trouble")
	require.Equal(t, noon, found[0].Since)
	require.Contains(t, found[0].Text, "writing")

	warning := update(4, "", 90)[0]
	worse := update(5, "", 99)
	require.Len(t, worse, 1)
	require.NotEqual(t, warning.Key, worse[0].Key)
	require.Equal(t, at(5), worse[0].Since, "what becomes worse is new")
}

func TestIngressesAreMissed(t *testing.T) {
	t.Parallel()
	find := func(f *Fleet, s *Snapshot, r round) []string {
		s.Troubles = nil
		f.troubles.update(f, s, r)
		return troubleNames(s)
	}
	f, s, r := healthy()
	require.Empty(t, find(f, s, r))
	s.Processes[0].Kind = "worker"
	require.Equal(t, []string{noIngress.name}, find(f, s, r), "its name has no address any more")

	f, s, r = healthy()
	s.Processes[0].Kind = "worker"
	require.Empty(t, find(f, s, r), "only the worker is watched")
	s.Processes = append(s.Processes, Process{Target: "http://two/metrics"})
	require.Empty(t, find(f, s, r), "it was not asked yet")
	s.Processes[1].Error = "refused"
	require.Equal(t, []string{noIngress.name}, find(f, s, r), "the target that never answered may be one")
	require.Equal(t, targetGone.name, s.Troubles[0].Consequences[0].Name)
}
