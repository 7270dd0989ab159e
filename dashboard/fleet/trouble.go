package fleet

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"stampede/internal/figure"
	"stampede/reservation"
)

// The sections of docs/runbook.md, which are the names of the alerts.
const (
	atPurchasesShed       = "purchases-shed"
	atPurchasesFail       = "purchases-fail"
	atBacklogGrows        = "backlog-grows"
	atOrderWaits          = "order-waits"
	atNoWorker            = "no-worker"
	atStepFails           = "step-fails"
	atDeadLetterParked    = "dead-letter-parked"
	atOrderRejected       = "order-rejected"
	atOrderVoided         = "order-voided"
	atStockRebuilt        = "stock-rebuilt"
	atSaleShut            = "sale-shut"
	atRedisMemory         = "redis-memory"
	atRedisSync           = "redis-sync"
	atAuditOld            = "audit-old"
	atPromiseBroken       = "promise-broken"
	atTargetGone          = "target-gone"
	atPostgresGone        = "postgres-gone"
	atRedisGone           = "redis-gone"
	atRelayLags           = "relay-lags"
	atOperatorsFileFaulty = "operators-file-faulty"
	atReceiptsRefused     = "receipts-refused"
)

const (
	// holdRates is how long a trouble is shown after the last second in which it was seen, if it comes and goes.
	holdRates = 10 * time.Second
	// holdEnds is how long it is shown that orders were rejected or voided, and that the stock was rebuilt.
	holdEnds = 5 * time.Minute
	// delayed is how long a state must last that is also passed in ordinary operation, such as the restart of a worker.
	delayedStep, delayedReader, delayedShut = 5 * time.Second, 15 * time.Second, 3 * time.Second

	// waitsMax is how long an order may wait for its worker.
	waitsMax = 30 * time.Second
	// backlogLeast is how many orders may wait while more and more do, and backlogFor is for how long they must become
	// more.
	backlogLeast, backlogFor = 1000, 30
	auditAgeMax              = 24 * time.Hour

	relayLagMax, relayFailuresMax, relayHeldMax = 60, 5, 30
	memoryWarning, memoryCritical               = 0.8, 0.95
	// stepName is the step of a worker whose name another process uses.
	stepName = "name"
	// troublesMax bounds the troubles of a snapshot.
	troublesMax = 200
)

// orderEnds are the orders that ended badly in one round, and the rebuilds of stock whose Redis was lost: orders that
// only that Redis had are counted nowhere.
type orderEnds struct{ rejected, voided, rebuilds float64 }

// round is what one round has found beside its snapshot.
type round struct {
	gained  *increase
	ended   orderEnds
	streams map[string]streamSample
}

// troubles remembers since when something is wrong. It is guarded by Fleet.mu.
type troubles struct {
	known map[string]*lasting
	// backlog is the backlog of the last rounds, oldest first.
	backlog []int64
	// rejected and voided are the orders since the trouble was first shown.
	ended orderEnds
	now   time.Time
}

// lasting is a trouble that was seen, at the latest at seen.
type lasting struct {
	Trouble
	seen time.Time
	// after is how long it must last to be shown, hold how long it is shown after it was last seen.
	after, hold time.Duration
}

// raise notes a trouble that is seen now. The key tells it from others; the text may change.
func (t *troubles) raise(key string, severity Severity, runbook string, text string, a ...any) *lasting {
	key = runbook + " " + key
	one := t.known[key]
	if one == nil {
		one = &lasting{Trouble: Trouble{Key: key, Since: t.now, Runbook: runbook}}
		t.known[key] = one
	}
	one.Severity, one.Text, one.seen = severity, fmt.Sprintf(text, a...), t.now
	return one
}

// since sets since when the trouble lasts, if that is known better.
func (l *lasting) since(since time.Time) *lasting {
	l.Since = since
	return l
}

// update finds what is wrong now, and stores it in the snapshot, the worst first.
func (t *troubles) update(f *Fleet, s *Snapshot, r round) {
	t.now = s.At
	if t.known == nil {
		t.known = map[string]*lasting{}
	}
	t.checkServers(f, s)
	t.checkProcesses(f, s, r)
	t.checkPurchases(s, r)
	t.checkOrders(f, s, r)
	t.checkSales(s)
	t.checkAudit(f, s)
	for key, one := range t.known {
		if t.now.Sub(one.seen) > one.hold {
			delete(t.known, key)
			continue
		}
		if t.now.Sub(one.Since) >= one.after {
			s.Troubles = append(s.Troubles, one.Trouble)
		}
	}
	slices.SortFunc(s.Troubles, func(a, b Trouble) int {
		return cmp.Or(cmp.Compare(a.Severity, b.Severity), a.Since.Compare(b.Since), cmp.Compare(a.Text, b.Text))
	})
	if len(s.Troubles) > troublesMax {
		s.Troubles = s.Troubles[:troublesMax]
	}
}

func (t *troubles) checkServers(f *Fleet, s *Snapshot) {
	if !s.Postgres.Reachable && s.Postgres.Error != "" {
		t.raise("", Critical, atPostgresGone, "Postgres does not answer: %s", s.Postgres.Error).since(s.Postgres.Since)
	}
	if s.Postgres.Reachable && f.records.readOnly {
		t.raise("", Critical, atPostgresGone, "Postgres takes no writes (stampede doctor says why)")
	}
	if !s.Redis.Reachable && s.Redis.Error != "" {
		t.raise("", Critical, atRedisGone, "Redis does not answer: %s", s.Redis.Error).since(s.Redis.Since)
	}
	if !s.Redis.Reachable {
		return
	}
	for _, n := range f.nodes {
		if !n.health.up && n.health.err != "" {
			t.raise(n.Name, Critical, atRedisGone, "Redis %s does not answer, and its sales sell nothing: %s",
				n.Name, n.health.err).since(n.health.since)
		}
		if n.MaxBytes > 0 {
			share := float64(n.UsedBytes) / float64(n.MaxBytes)
			severity := Warning
			if share >= memoryCritical {
				severity = Critical
			}
			if share >= memoryWarning {
				t.raise(n.Name, severity, atRedisMemory, "Redis %s uses %.0f %% of its memory: without memory it sells nothing",
					n.Name, 100*share)
			}
		}
		if n.LogFails {
			t.raise(n.Name, Critical, atRedisSync, "Redis %s cannot write its log to the disk", n.Name)
		} else if !n.delayedAt.IsZero() && t.now.Sub(n.delayedAt) < time.Minute {
			t.raise(n.Name, Warning, atRedisSync, "Redis %s waits for its disk: it delays purchases to sync its log", n.Name)
		}
	}
}

func (t *troubles) checkProcesses(f *Fleet, s *Snapshot, r round) {
	up, known := map[string]int{}, map[string]int{}
	for i := range s.Processes {
		p := &s.Processes[i]
		for part := range strings.SplitSeq(p.Kind, ", ") {
			known[part]++
			if p.Up {
				up[part]++
			}
		}
		if p.Up || p.Error == "" { // without an error it was not asked yet
			continue
		}
		what := cmp.Or(p.Kind, "target")
		t.raise(p.Target, Warning, atTargetGone, "%s %s is gone: %s", what, p.Target, p.Error).since(p.Since)
	}
	if known["ingress"] > 0 && up["ingress"] == 0 {
		t.raise("ingresses", Critical, atTargetGone, "no ingress answers")
	}
	if known["worker"] > 0 && up["worker"] == 0 {
		t.raise("", Critical, atNoWorker, "no worker answers: orders wait in Redis until one does")
	}
	for name, one := range r.streams {
		if !one.reads {
			t.raise(name, Critical, atNoWorker, "no worker reads the stream %s", name).after = delayedReader
		}
	}
	signer := map[string]string{} // an ingress for each secret
	for _, p := range f.processes {
		if !p.up {
			continue
		}
		if p.last.receiptSecret != "" {
			signer[p.last.receiptSecret] = p.name
		}
		if !p.othersAt.IsZero() && t.now.Sub(p.othersAt) < holdOthers {
			t.raise(p.url+" others", Warning, atTargetGone, "several processes answer at %s, so its figures are those of one "+
				"or the other: name each of them", p.name)
		}
		for _, step := range p.last.failing {
			text := fmt.Sprintf("the step %s of %s fails and is retried", step, p.name)
			if step == stepName {
				text = fmt.Sprintf("another worker has the name of %s: give each its own STAMPEDE_CONSUMER", p.name)
			}
			t.raise(p.url+step, Warning, atStepFails, "%s", text).after = delayedStep
		}
		if p.last.operatorsFile {
			t.raise(p.url, Warning, atOperatorsFileFaulty, "the operators' file of %s has a fault, or cannot be read", p.name)
		}
		for name, one := range p.last.relayTargets {
			t.checkRelay(name, one)
		}
	}
	if len(signer) > 1 {
		t.raise("", Critical, atReceiptsRefused, "ingresses have different secrets for receipts, and refuse each other's: %s",
			strings.Join(slices.Sorted(maps.Values(signer)), ", "))
	}
}

func (t *troubles) checkRelay(name string, one relaySample) {
	switch {
	case one.disabled:
		t.raise(name, Warning, atRelayLags, "the relay's target %s is disabled: its receiver has answered 410", name)
	case one.failing > relayFailuresMax:
		t.raise(name, Warning, atRelayLags, "the relay's target %s fails, %.0f times in a row", name, one.failing)
	case one.lag > relayLagMax:
		t.raise(name, Warning, atRelayLags, "the relay's target %s is %v behind", name, seconds(one.lag).Round(time.Second))
	case one.held > relayHeldMax:
		t.raise(name, Warning, atRelayLags, "an open transaction has held up the events for %s for %v", name,
			seconds(one.held).Round(time.Second))
	}
}

func (t *troubles) checkPurchases(s *Snapshot, r round) {
	// A client that is rate-limited is no trouble of the shop.
	if r.gained.overloaded > 0 {
		t.raise("", Critical, atPurchasesShed, "%.0f of %.0f purchases a second are shed, because there are too many",
			r.gained.overloaded, s.Rates.Offered).hold = holdRates
	}
	if s.Rates.Failed > 0 {
		t.raise("", Critical, atPurchasesFail, "%.0f of %.0f purchases a second fail: Redis is not reached, or does not "+
			"answer", s.Rates.Failed, s.Rates.Offered).hold = holdRates
	}
}

func (t *troubles) checkOrders(f *Fleet, s *Snapshot, r round) {
	if s.Rates.BacklogKnown {
		if t.backlog = append(t.backlog, s.Rates.Backlog); len(t.backlog) > backlogFor {
			t.backlog = t.backlog[1:]
			first, middle := t.backlog[0], t.backlog[backlogFor/2]
			if s.Rates.Backlog >= backlogLeast && s.Rates.Backlog > middle && middle > first {
				t.raise("", Warning, atBacklogGrows, "%s orders wait for a worker, and they become more",
					figure.Count(s.Rates.Backlog)).hold = holdRates
			}
		}
		if s.Rates.OldestWaiting > waitsMax {
			t.raise("", Critical, atOrderWaits, "an accepted order has waited for %v", s.Rates.OldestWaiting.Round(time.Second))
		}
	} else {
		t.backlog = nil
	}
	if s.DeadLetters > 0 && s.Postgres.Reachable {
		t.raise("", Warning, atDeadLetterParked, "%s parked: their orders wait for an operator",
			several(s.DeadLetters, "dead letter is", "dead letters are")).since(f.records.oldestLetter)
	}
	end := func(key, what, why string, more float64, total *float64) {
		if t.known[key+" "] == nil {
			*total = 0
		}
		if *total += more; more > 0 {
			t.raise("", Critical, key, "%s %s: %s",
				several(int64(*total), "order was", "orders were"), what, why).hold = holdEnds
		}
	}
	end(atOrderRejected, "rejected", "Redis and Postgres disagreed", r.ended.rejected, &t.ended.rejected)
	end(atOrderVoided, "voided", "they were lost with Redis", r.ended.voided, &t.ended.voided)
	if r.ended.rebuilds > 0 {
		t.raise("", Warning, atStockRebuilt, "workers rebuilt the stock: orders that only the lost Redis had are voided").
			hold = holdEnds
	}
}

func (t *troubles) checkSales(s *Snapshot) {
	for i := range s.Sales {
		if sale := &s.Sales[i]; sale.Shut != "" {
			t.raise(sale.ID.String(), Critical, atSaleShut, "the sale %s sells nothing: %s", printable(sale.Name), sale.Shut).
				after = delayedShut
		}
	}
}

func (t *troubles) checkAudit(f *Fleet, s *Snapshot) {
	if f.records.at.IsZero() || !s.Postgres.Reachable {
		return
	}
	if s.Audit == nil {
		for i := range f.sales.listed {
			sale := &f.sales.listed[i]
			if t.now.Sub(sale.CreatedAt) > auditAgeMax && sale.State != reservation.StateEnded {
				t.raise("", Warning, atAuditOld, "no audit was ever recorded").since(sale.CreatedAt.Add(auditAgeMax))
				return
			}
		}
		return
	}
	if age := t.now.Sub(s.Audit.At); age > auditAgeMax {
		t.raise("", Warning, atAuditOld, "the newest audit is %d hours old", int(age.Hours())).
			since(s.Audit.At.Add(auditAgeMax))
	}
	if len(s.Audit.Broken) > 0 {
		t.raise("", Critical, atPromiseBroken, "the newest audit has found %s broken", strings.Join(s.Audit.Broken, ", ")).
			since(s.Audit.At)
	}
}

// several is a number with its noun.
func several(n int64, one, more string) string {
	if n == 1 {
		return "1 " + one
	}
	return figure.Count(n) + " " + more
}
