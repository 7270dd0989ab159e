//go:build system && desk

package main

import (
	"crypto/sha256"
	"flag"
	"fmt"
	"maps"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/reservation/order"
)

var (
	deskOnly    = flag.String("desk.only", "", "`part` of the names of the incidents to play")
	deskFigures = flag.String("desk.figures", "", "`file` of the page whose table gets the figures")
)

// incident is something that goes wrong, and how it is said.
type incident struct {
	what string
	// alert is the name and the severity of the alert that says it, and no other does.
	alert string
	// before prepares it, and begin is its beginning.
	before, begin func(s *site)
	// goesOn is called again twice a second, as long as it lasts. If every is set, it happens again after that time, until
	// all have said it: top tells of what happens while it looks.
	goesOn func(s *site)
	every  time.Duration
	// end undoes it.
	end func(s *site)
	// last is true of what is said for minutes after it has ended: nothing is played after it.
	last bool
}

var capital = regexp.MustCompile(`([a-z])([A-Z])`)

// said is how the dashboard, top and the alerts say an incident: the name of the alert, its severity, and the section
// of the runbook that is named after it.
func (i incident) said() string {
	name, _, _ := strings.Cut(i.alert, " ")
	return i.alert + " #" + strings.ToLower(capital.ReplaceAllString(name, "$1-$2"))
}

// figures are the seconds from the beginning of an incident until it was said.
type figures struct{ page, top, alert float64 }

// incidents are those that are played, by the site on which one follows the other.
var incidents = map[string][]incident{
	"postgres": {
		{
			what: "Postgres is frozen", alert: "PostgresGone critical",
			begin: func(s *site) { s.signalPostgres(syscall.SIGSTOP) },
			end:   func(s *site) { s.signalPostgres(syscall.SIGCONT) },
		},
		{
			what: "Postgres is killed", alert: "PostgresGone critical",
			begin: func(s *site) { s.postgres.StopImmediate() },
			end:   func(s *site) { require.NoError(s.t, s.postgres.Restart(s.t.Context())) },
		},
		{
			what: "Postgres takes no writes", alert: "PostgresGone critical",
			begin: func(s *site) { s.setPostgres("SET default_transaction_read_only = on") },
			end:   func(s *site) { s.setPostgres("RESET default_transaction_read_only") },
		},
		{
			what: "the clock of Postgres is ahead", alert: "ClocksApart warning",
			begin: func(s *site) { s.setClock(3 * time.Second) },
			end:   func(s *site) { s.setClock(0) },
		},
		{
			what: "Postgres is slow", alert: "OrderWaits critical",
			before: func(s *site) { s.slowDown(4 * time.Second) },
			begin:  func(s *site) { s.crowd(500) },
			end:    func(s *site) { s.slowDown(0) },
		},
	},
	"redis and relay": {
		{
			what: "Redis is frozen", alert: "RedisGone critical",
			begin: func(s *site) { s.redis.Freeze() },
			end:   func(s *site) { s.redis.Thaw() },
		},
		{
			what: "Redis is full", alert: "RedisMemory critical",
			begin: func(s *site) { s.setRedis("maxmemory", "1mb") },
			end:   func(s *site) { s.setRedis("maxmemory", "1gb") },
		},
		{
			what: "Redis fills up", alert: "RedisMemory warning",
			begin: func(s *site) { s.fillRedis(0.88) },
			end:   func(s *site) { s.setRedis("maxmemory", "1gb") },
		},
		{
			what: "the log of Redis is off", alert: "RedisSync critical",
			begin: func(s *site) { s.setRedis("appendonly", "no") },
			end:   func(s *site) { s.setRedis("appendonly", "yes") },
		},
		{
			what: "the relay is killed", alert: "NoRelay critical",
			begin: func(s *site) {
				s.kill("relay")
				s.confirmed()
			},
			end: func(s *site) { s.restart("relay") },
		},
		{
			what: "a receiver of events answers 500", alert: "RelayLags warning",
			before: func(s *site) { s.hook("shop", http.StatusInternalServerError) },
			begin:  func(s *site) { s.confirmed() },
			end:    func(s *site) { s.ends(exitOK, "relay", "remove", "shop") },
		},
		{
			what: "a sale is deleted in Redis", alert: "StockRebuilt warning",
			begin: (*site).loseSale, goesOn: (*site).loseSale, every: 12 * time.Second, last: true,
		},
	},
	"workers": {
		{
			what: "all workers are killed", alert: "NoWorker critical",
			begin: func(s *site) { s.kill("worker-1", "worker-2") },
			end:   func(s *site) { s.restart("worker-1", "worker-2") },
		},
		{
			what: "one worker is frozen", alert: "TargetGone warning",
			begin: func(s *site) { s.running["worker-2"].Freeze() },
			end:   func(s *site) { s.running["worker-2"].Thaw() },
		},
		{
			what: "one worker does not reach Postgres", alert: "PostgresGone critical",
			begin: func(s *site) { s.ways["worker-2 to Postgres"].cut() },
			end:   func(s *site) { s.ways["worker-2 to Postgres"].mend() },
		},
		{
			what: "one worker does not reach Redis", alert: "RedisGone critical",
			begin: func(s *site) { s.ways["worker-2 to Redis"].cut() },
			end:   func(s *site) { s.ways["worker-2 to Redis"].mend() },
		},
		{
			what: "two workers have one name", alert: "StepFails warning",
			begin: func(s *site) { s.start("worker-2", "STAMPEDE_CONSUMER", "worker-1") },
			end:   func(s *site) { s.restart("worker-2") },
		},
		{
			what: "entries are deleted in the stream", alert: "EntryLost critical",
			begin: (*site).loseEntry, goesOn: (*site).loseEntry, every: 2 * time.Second, last: true,
		},
	},
	"ingresses": {
		{
			what: "all ingresses are killed", alert: "NoIngress critical",
			begin: func(s *site) { s.kill("ingress-1", "ingress-2") },
			end:   func(s *site) { s.restart("ingress-1", "ingress-2") },
		},
		{
			what: "one ingress does not reach Redis", alert: "IngressNotReady warning",
			begin: func(s *site) { s.ways["ingress-2 to Redis"].cut() },
			end:   func(s *site) { s.ways["ingress-2 to Redis"].mend() },
		},
		{
			what: "an ingress has another secret for receipts", alert: "ReceiptsRefused critical",
			begin: func(s *site) { s.start("ingress-2", "STAMPEDE_RECEIPT_SECRET", strings.Repeat("x", 32)) },
			end:   func(s *site) { s.restart("ingress-2") },
		},
		{
			what: "the key set of the tokens is out of reach", alert: "KeySetFaulty critical",
			begin: func(s *site) {
				s.restartIngresses("STAMPEDE_AUTH", "jwt", "STAMPEDE_JWKS_URL", "http://127.0.0.1:1/keys")
			},
			end: func(s *site) { s.restartIngresses() },
		},
		{
			what: "the operators' file has a fault", alert: "OperatorsFileFaulty warning",
			begin: func(s *site) { s.appoint("ann\n") },
			end:   func(s *site) { s.appoint("") },
		},
		{
			what: "more buyers come than an ingress takes", alert: "PurchasesShed critical",
			before: func(s *site) { s.start("ingress-1", "STAMPEDE_MAX_IN_FLIGHT", "16") },
			begin:  func(s *site) { s.crowd(200) }, goesOn: func(s *site) { s.crowd(200) },
			end: func(s *site) { s.restart("ingress-1") },
		},
		{
			what: "no replica confirms a reservation", alert: "PurchasesFail critical",
			before: func(s *site) { s.restartIngresses("STAMPEDE_REPLICA_ACKS", "1") },
			begin:  func(s *site) { s.crowd(5) }, goesOn: func(s *site) { s.crowd(5) },
			end: func(s *site) { s.restartIngresses() },
		},
		{
			what: "Postgres refuses what Redis accepts", alert: "OrderRejected critical",
			begin: (*site).reject, goesOn: (*site).reject, every: 2 * time.Second, last: true,
		},
	},
	"money": {
		{
			what: "the token of the cashier is revoked", alert: "PaymentsRefused critical",
			before: (*site).appointCashier,
			begin:  func(s *site) { s.appoint("") },
			goesOn: func(s *site) { s.reports(5, 4900) },
			end:    (*site).forget,
		},
		{
			what: "nobody refunds for a day", alert: "RefundDue warning",
			before: func(s *site) { s.report(order.Money{Reference: "pi_late", Amount: 100, Currency: "EUR"}) },
			begin:  func(s *site) { s.waitsFor("pi_late", "25 hours") },
			end:    func(s *site) { s.ends(exitOK, "payment", "refunded", "pi_late", "re_1") },
		},
		{
			what: "nobody looks at an unclear payment for an hour", alert: "PaymentUnclear warning",
			before: func(s *site) { s.report(order.Money{Reference: "pi_unclear", Unclear: order.UnclearOrder}) },
			begin:  func(s *site) { s.waitsFor("pi_unclear", "61 minutes") },
			end:    func(s *site) { s.ends(exitOK, "payment", "dismissed", "pi_unclear", "of another shop") },
		},
		{
			what: "a payer disputes a payment", alert: "PaymentDisputed warning",
			before: func(s *site) {
				s.report(order.Money{Reference: "pi_bank", OrderID: s.confirmed(), Amount: 4900, Currency: "EUR"})
			},
			begin: func(s *site) { s.dispute("pi_bank", order.DisputeOpen) },
			end:   func(s *site) { s.dispute("pi_bank", order.DisputeWon) },
		},
		{
			what: "an entry cannot be read", alert: "DeadLetterParked warning",
			begin: func(s *site) { s.poison() },
			end:   func(s *site) { s.ends(exitOK, "dlq", "discard", "1", "--reason=poison") },
		},
		{
			what: "Postgres is changed by hand", alert: "PromiseBroken critical",
			before: func(s *site) { s.exec("UPDATE sales SET sold = sold + 1") },
			begin:  func(s *site) { s.ends(exitFailed, "audit", "--wait=1ms") },
			end: func(s *site) {
				s.exec("UPDATE sales SET sold = sold - 1")
				s.ends(exitOK, "audit", "--wait=1m")
			},
		},
		{
			what: "the cashier reports wrong amounts", alert: "PaymentsRefused critical",
			before: (*site).appointCashier,
			begin:  func(s *site) { s.reports(5, 49) }, goesOn: func(s *site) { s.reports(5, 49) },
			end: (*site).forget,
		},
		{
			what: "an order contradicts its log", alert: "OrderSetAside warning",
			before: func(s *site) { s.wrong = s.confirmed() },
			begin: func(s *site) {
				s.exec("UPDATE orders SET version = 9 WHERE id = $1", s.wrong)
				testwork.EndWindow(s.t, s.pool, s.wrong)
			},
			last: true,
		},
	},
	"draws and guards": {
		{
			what: "nobody audits for a day", alert: "AuditOld warning",
			begin: func(s *site) { s.exec("UPDATE audits SET at = at - interval '25 hours'") },
			end:   func(s *site) { s.ends(exitOK, "audit", "--wait=1m") },
		},
		{
			what: "nobody brings the beacon of a draw", alert: "DrawWaits critical",
			before: func(s *site) { s.frozenDraw() },
			begin:  func(s *site) { testshop.MoveDrawToRound(s.t, s.pool, s.drawn) },
			end: func(s *site) {
				s.ends(exitOK, "draw", "beacon", s.drawn.String(), "--round", fmt.Sprint(testshop.BeaconRound), "--signature",
					testshop.BeaconSignature)
			},
		},
		{
			what: "a party of a draw does not reveal its secret", alert: "DrawVoid critical",
			before: func(s *site) { s.frozenDraw(fmt.Sprintf("--party=notary:%x", sha256.Sum256([]byte("secret")))) },
			begin: func(s *site) {
				s.exec("UPDATE draws SET frozen_at = frozen_at - interval '1 day' WHERE sale_id = $1", s.drawn)
			},
			end: func(s *site) { s.ends(exitOK, "sale", "end", s.drawn.String()) },
		},
		{
			what: "nobody answers offers of a waiting list", alert: "OffersUnanswered warning",
			begin: (*site).offer,
			end:   func(s *site) { s.ends(exitOK, "sale", "end", s.drawn.String()) },
		},
		{
			what: "one ingress does not reach Postgres", alert: "GuardOld warning",
			begin: func(s *site) { s.ways["ingress-2 to Postgres"].cut() },
			end:   func(s *site) { s.ways["ingress-2 to Postgres"].mend() },
		},
		{
			what: "Redis is killed", alert: "RedisGone critical",
			begin: func(s *site) { s.redis.Kill() },
			last:  true,
		},
	},
}

// Whatever goes wrong, the dashboard, top and one notification say the same: one trouble, by the name of its alert,
// with its section of the runbook. What follows from it is not said beside it.
func TestIncidentIsSaidOnce(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	measured := map[string]figures{}
	t.Run("all", func(t *testing.T) {
		for name, list := range incidents {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				s := newSite(t, name == "postgres")
				for _, i := range list {
					if !strings.Contains(i.what, *deskOnly) {
						continue
					}
					f := s.play(i)
					t.Logf("%s: %.1f s to the page, %.1f s to top, %.1f s to the alert", i.what, f.page, f.top, f.alert)
					mu.Lock()
					measured[i.what] = f
					mu.Unlock()
				}
			})
		}
	})
	table := tableOf(t, measured)
	t.Logf("%d incidents:\n%s", len(measured), table)
	if *deskFigures != "" && !t.Failed() {
		require.NoError(t, replaceTable(*deskFigures, table))
	}
}

// tableOf writes the figures in Markdown, in the order of incidents.
func tableOf(t *testing.T, measured map[string]figures) string {
	t.Helper()
	delays := map[string]time.Duration{}
	for _, r := range alerts(t) {
		delays[r.Alert+" "+r.Labels["severity"]], _ = time.ParseDuration(r.For) // none is 0
	}
	table := "| what | alert | page, s | top, s | alert, s | as deployed, s |\n|---|---|---|---|---|---|\n"
	for _, site := range slices.Sorted(maps.Keys(incidents)) {
		for _, i := range incidents[site] {
			if f, ok := measured[i.what]; ok {
				spared := delays[i.alert] - delays[i.alert]/alertsFaster
				table += fmt.Sprintf("| %s | %s | %.1f | %.1f | %.1f | %.0f |\n", i.what, strings.Replace(i.alert, " ", ", ", 1),
					f.page, f.top, f.alert, f.alert+spared.Seconds())
			}
		}
	}
	return table
}

// replaceTable replaces the table of a page.
func replaceTable(page, table string) error {
	text, err := os.ReadFile(page)
	if err != nil {
		return err
	}
	header, _, _ := strings.Cut(table, "\n")
	before, rest, found := strings.Cut(string(text), header+"\n")
	for found && strings.HasPrefix(rest, "|") {
		_, rest, _ = strings.Cut(rest, "\n")
	}
	if !found {
		return fmt.Errorf("%s has no table %s", page, header)
	}
	return os.WriteFile(page, []byte(before+table+rest), 0o600)
}
