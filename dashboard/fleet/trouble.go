package fleet

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"stampede/internal/clocks"
	"stampede/internal/format"
	"stampede/upkeep/rebuild"
)

const (
	// holdRates is how long a trouble is shown after the last second in which it was seen, if it comes and goes.
	holdRates = 10 * time.Second
	// holdEnds is how long it is shown that orders ended badly, that entries were lost, that the stock was rebuilt, and
	// that the disk of Redis was slow.
	holdEnds = 10 * time.Minute
	// delayed is how long a state must last that is also passed in ordinary operation, such as the restart of a worker.
	delayedStep, delayedReader, delayedShut = 5 * time.Second, 15 * time.Second, 3 * time.Second
	delayedReleases, delayedKeySet          = 5 * time.Minute, 2 * time.Minute

	// shareMost is the share of purchases that may be shed, or fail.
	shareMost = 0.01
	// waitsMax is how long an order may wait for its worker.
	waitsMax = 30 * time.Second
	// backlogLeast is how many orders may wait while more and more do, and backlogFor is for how long they must become
	// more.
	backlogLeast, backlogFor = 1000, 30
	auditAgeMax              = 24 * time.Hour
	guardAgeMax              = 60
	// refundAgeMax, paymentWaitMax and unclearAgeMax are in seconds. The refund of a payment without an order is due after
	// ten minutes.
	refundAgeMax, paymentWaitMax, unclearAgeMax = 86400, 900, 3600

	relayLagMax, relayFailuresMax, relayHeldMax = 60, 5, 30
	memoryWarning, memoryCritical               = 0.8, 0.95
	// stepName is the step of a worker whose name another process uses.
	stepName = "name"
	// troublesMax bounds the troubles of a snapshot.
	troublesMax = 200
)

// ends are what ended badly in one round: orders, and entries that were deleted. rebuilds has the reasons of those of
// stock: orders that only a lost Redis had are counted nowhere.
type ends struct {
	rejected, voided, lost float64
	rebuilds               map[string]bool
}

// round is what one round has found beside its snapshot.
type round struct {
	gained  *increase
	ended   ends
	streams map[string]streamSample
	money   money
}

// troubles remembers since when something is wrong. It is guarded by Fleet.mu.
type troubles struct {
	known map[string]*lasting
	// backlog is the backlog of the last rounds, oldest first.
	backlog []int64
	// ended are those since the trouble was first shown.
	ended ends
	money []moneyAt
	now   time.Time
	// seen has the parts of processes that have ever answered.
	seen []string
}

// lasting is a trouble that was seen, at the latest at seen.
type lasting struct {
	*kind
	key, text   string
	begun, seen time.Time
	// after is how long it must last to be shown, hold how long it is shown after it was last seen.
	after, hold time.Duration
	// causes are those of the kind, or of this one.
	causes []*kind
	// ofOne is true if only one process or node has it: it explains nothing of the others. because is such a one that
	// explains this trouble if no cause does.
	ofOne   bool
	because *lasting
}

// key tells a trouble of the kind from others. One that becomes worse is a new one.
func (k *kind) key(of string) string { return fmt.Sprintf("%s %s %s", k.name, k.severity, of) }

// raise notes a trouble that is seen now. It tells it by what it is of from others of its kind; the text may change.
func (t *troubles) raise(k *kind, of string, text string, a ...any) *lasting {
	key := k.key(of)
	one := t.known[key]
	if one == nil {
		one = &lasting{key: key, begun: t.now}
		t.known[key] = one
	}
	one.after, one.hold, one.ofOne, one.because = 0, 0, false, nil
	one.kind, one.causes, one.text, one.seen = k, k.causes, k.summary+": "+fmt.Sprintf(text, a...), t.now
	return one
}

// since sets since when the trouble lasts, if that is known better.
func (l *lasting) since(since time.Time) *lasting {
	l.begun = since
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
	t.checkPurchases(f, s, r)
	t.checkPayments(r.money)
	t.checkOrders(f, s, r)
	t.checkSales(s)
	t.checkDraws(f, s)
	t.checkNoRelay(f, s)
	t.checkAudit(f, s)
	var shown, pending []*lasting
	for key, one := range t.known {
		if t.now.Sub(one.seen) > one.hold {
			delete(t.known, key)
		} else if t.now.Sub(one.begun) >= one.after {
			shown = append(shown, one)
		} else {
			pending = append(pending, one)
		}
	}
	slices.SortFunc(shown, func(a, b *lasting) int {
		return cmp.Or(cmp.Compare(a.severity, b.severity), a.begun.Compare(b.begun), cmp.Compare(a.text, b.text))
	})
	s.Troubles = underCauses(shown[:min(len(shown), troublesMax)])
	s.Pending = unexplained(pending, shown)
}

// underCauses puts the consequences of a trouble under it.
func underCauses(shown []*lasting) []Trouble {
	first := map[*kind]int{} // the place of the first trouble of each kind that may be a cause
	for i, one := range slices.Backward(shown) {
		if !one.ofOne {
			first[one.kind] = i
		}
	}
	root := func(i int) int { // the trouble at the end of its causes
		isSeen := func(cause *kind) bool { _, seen := first[cause]; return seen }
		for {
			if at := slices.IndexFunc(shown[i].causes, isSeen); at >= 0 {
				i = first[shown[i].causes[at]]
			} else if at := slices.Index(shown, shown[i].because); at >= 0 {
				i = at
			} else {
				return i
			}
		}
	}
	consequences := map[int][]Trouble{} // by the place of their root
	for i, one := range shown {
		if to := root(i); to != i {
			consequences[to] = append(consequences[to], one.trouble())
		}
	}
	roots := []Trouble{}
	for i, one := range shown {
		if root(i) == i {
			t := one.trouble()
			t.Consequences = consequences[i]
			roots = append(roots, t)
		}
	}
	worst := func(t Trouble) Severity { // "critical" is the least
		for _, c := range t.Consequences {
			t.Severity = min(t.Severity, c.Severity)
		}
		return t.Severity
	}
	slices.SortStableFunc(roots, func(a, b Trouble) int { return cmp.Compare(worst(a), worst(b)) })
	return roots
}

func (l *lasting) trouble() Trouble {
	return Trouble{Name: l.name, Severity: l.severity, Text: l.text, Key: l.key, Since: l.begun, Runbook: l.runbook()}
}

func (t *troubles) checkServers(f *Fleet, s *Snapshot) {
	if !s.Postgres.Reachable && s.Postgres.Error != "" {
		t.raise(postgresGone, "", "%s", s.Postgres.Error).since(s.Postgres.Since)
	}
	if s.Postgres.Reachable && f.records.readOnly {
		t.raise(postgresGone, "", "it takes no writes (stampede doctor says why)")
	}
	if !s.Redis.Reachable && s.Redis.Error != "" {
		t.raise(redisGone, "", "%s", s.Redis.Error).since(s.Redis.Since)
	}
	if !s.Redis.Reachable {
		return
	}
	for _, n := range f.nodes {
		if n.isDown() {
			gone := t.raise(redisGone, n.Name, "%s, whose sales sell nothing: %s", n.Name, n.health.err)
			gone.since(n.health.since).ofOne = true
		}
		if n.Err != nil {
			continue
		}
		if n.Clock != nil && s.Postgres.Reachable && !f.records.at.IsZero() {
			t.checkClock(n.Name, n.Name, n.Clock.Ahead(f.records.clock))
		}
		switch share := float64(n.UsedBytes) / max(1, float64(n.MaxBytes)); {
		case n.MaxBytes == 0:
		case share > memoryCritical:
			t.raise(redisFull, n.Name, "%s uses %.0f %% of its maxmemory, and sells nothing when it is full", n.Name, 100*share)
		case share > memoryWarning:
			t.raise(redisFills, n.Name, "%s uses %.0f %% of its maxmemory, and sells nothing when it is full", n.Name, 100*share)
		}
		switch {
		case n.LogFails:
			t.raise(redisNoLog, n.Name, "%s cannot write it to the disk", n.Name)
		case !n.LogOn:
			t.raise(redisNoLog, n.Name, "the append-only file of %s is off", n.Name).after = delayedReader // it may be loading
		case !n.delayedAt.IsZero() && t.now.Sub(n.delayedAt) < holdEnds:
			t.raise(redisSlow, n.Name, "%s has delayed purchases to sync its log", n.Name)
		}
	}
}

// isMissed is true if no process with this part answers, and there was one, or may be: a target that never answered.
func (t *troubles) isMissed(s *Snapshot, part string) bool {
	missed := slices.Contains(t.seen, part)
	for i := range s.Processes {
		p := &s.Processes[i]
		has := strings.Contains(p.Kind, part)
		if has && !slices.Contains(t.seen, part) {
			t.seen = append(t.seen, part)
		}
		if has && p.Up {
			return false
		}
		missed = missed || has || p.Kind == "" && p.Error != "" // without an error it was not asked yet
	}
	return missed
}

func (t *troubles) checkProcesses(f *Fleet, s *Snapshot, r round) {
	for i := range s.Processes {
		if p := &s.Processes[i]; !p.Up && p.Error != "" {
			gone := t.raise(targetGone, p.Target, "%s %s is gone: %s", cmp.Or(p.Kind, "target"), p.Target, p.Error)
			gone.since(p.Since).causes = p.missedAs()
		}
	}
	if t.isMissed(s, "ingress") {
		t.raise(noIngress, "", "none answers").causes = nil
	} else if why := s.noneReady(); why != "" {
		t.raise(noIngress, "", "%s", why).after = delayedShut
	}
	if t.isMissed(s, "worker") {
		t.raise(noWorker, "", "none answers, and orders wait in Redis until one does")
	}
	for name, one := range r.streams {
		if !one.reads {
			t.raise(noWorker, name, "none reads the stream %s%s", name, s.whyIdle()).after = delayedReader
		}
	}
	signer := map[string]string{} // an ingress for each secret
	var keyless, verifying bool   // whether there are ingresses without keys, and others
	for _, p := range f.processes {
		if !p.up {
			continue
		}
		keyless = keyless || p.last.keySetOld && p.last.keys == 0
		verifying = verifying || p.last.keys > 0
		if p.last.receiptSecret != "" {
			signer[p.last.receiptSecret] = p.name
		}
		t.checkProcess(f, s, p)
	}
	if keyless && !verifying {
		t.raise(keySetGone, "", "STAMPEDE_JWKS_URL does not answer, or with no usable key").after = delayedShut
	}
	if len(signer) > 1 {
		t.raise(receiptsRefused, "", "they refuse each other's: %s", strings.Join(slices.Sorted(maps.Values(signer)), ", "))
	}
}

// missedAs are the troubles of which a process that is gone is a part.
func (p *Process) missedAs() (causes []*kind) {
	if p.Kind == "" || strings.Contains(p.Kind, "ingress") {
		causes = append(causes, noIngress)
	}
	if p.Kind == "" || strings.Contains(p.Kind, "worker") {
		causes = append(causes, noWorker)
	}
	if p.Kind == "" || strings.Contains(p.Kind, "relay") {
		causes = append(causes, noRelay)
	}
	return causes
}

// checkServersOf looks at the servers that a process does not reach. It returns the trouble that explains what else
// fails in this process: nil if it reaches both.
func (t *troubles) checkServersOf(f *Fleet, s *Snapshot, p *process) (cause *lasting) {
	says := p.last
	if says.redisGone && s.Redis.Reachable {
		if down := slices.IndexFunc(f.nodes, node.isDown); down >= 0 {
			cause = t.known[redisGone.key(f.nodes[down].Name)] // it answers no process
		} else {
			cause = t.raise(redisGone, p.url, "it does not answer %s", p.name)
			cause.after, cause.ofOne = delayedReader, true
		}
	}
	if says.postgresGone && s.Postgres.Reachable && !f.records.readOnly { // it is no other trouble if all miss it
		cause = t.raise(postgresGone, p.url, "it does not answer %s", p.name)
		cause.after, cause.ofOne = delayedReader, true
	}
	return cause
}

// checkProcess looks at what a process that answers says of itself.
func (t *troubles) checkProcess(f *Fleet, s *Snapshot, p *process) {
	says := p.last
	if !p.othersAt.IsZero() && t.now.Sub(p.othersAt) < holdOthers {
		t.raise(targetGone, p.url+" others", "several processes answer at %s, so its figures are those of one or the "+
			"other: name each of them", p.name)
	}
	t.checkClock(p.url, p.name, seconds(says.clockAhead))
	cause := t.checkServersOf(f, s, p)
	ofGuard := cause
	if says.notReady != "" {
		idle := t.raise(notReady, p.url, "%s: %s", p.name, says.notReady)
		idle.after, ofGuard = delayedReader, cmp.Or(cause, idle)
	}
	steps := slices.DeleteFunc(slices.Clone(says.failing), func(step string) bool { return step == stepName })
	if len(steps) < len(says.failing) {
		t.raise(stepFails, p.url+stepName, "another worker has the name of %s: give each its own STAMPEDE_CONSUMER",
			p.name).after = delayedStep
	}
	if len(steps) > 0 {
		fails := t.raise(stepFails, p.url, "%s, of %s", strings.Join(steps, ", "), p.name)
		if fails.after, fails.because = delayedStep, cause; cause != nil {
			fails.after, cause.after = delayedReader, min(cause.after, delayedStep) // the cause is shown first
		}
	}
	if says.guardAge > guardAgeMax {
		t.raise(guardOld, p.url, "%s has not done it for %v", p.name,
			seconds(says.guardAge).Round(time.Second)).because = ofGuard
	}
	if says.setAside > 0 {
		t.raise(orderSetAside, p.url, "%s cannot end %s", p.name,
			several(int64(says.setAside), "overdue order", "overdue orders"))
	}
	if says.releases > 0 {
		t.raise(releasesWait, "", "%s hold theirs in Redis",
			several(int64(says.releases), "ended order", "ended orders")).after = delayedReleases
	}
	if says.refundAge > refundAgeMax {
		t.raise(refundDue, "", "%s to be paid back, the oldest for %d hours",
			several(int64(says.refunds), "payment has", "payments have"), int(says.refundAge/3600))
	}
	if says.paymentAge > paymentWaitMax {
		t.raise(paymentWaits, "", "the oldest of %s has waited for %v", format.Count(int64(says.payments)),
			seconds(says.paymentAge).Round(time.Second))
	}
	if says.unclearAge > unclearAgeMax {
		t.raise(paymentUnclear, "", "%s for somebody to look, the oldest for %v",
			several(int64(says.unclear), "waits", "wait"), seconds(says.unclearAge).Round(time.Minute))
	}
	if says.disputed > 0 {
		t.raise(paymentDisputed, "", "%s", several(int64(says.disputed), "payment is disputed", "payments are disputed"))
	}
	if says.keySetOld && says.keys > 0 {
		t.raise(keySetOld, p.url, "%s has %s", p.name, several(int64(says.keys), "old key", "old keys")).after = delayedKeySet
	}
	if says.operatorsFile {
		t.raise(operatorsFile, p.url, "%s cannot read it, or it has a fault", p.name)
	}
	for name, one := range says.relayTargets {
		t.checkRelay(name, one)
	}
}

// checkClock compares a clock that is ahead of that of Postgres.
func (t *troubles) checkClock(of, name string, ahead time.Duration) {
	where := "ahead of"
	if ahead < 0 {
		where = "behind"
	}
	if ahead.Abs() > clocks.ApartMax {
		t.raise(clocksApart, of, "that of %s is %v %s that of Postgres", name, ahead.Abs().Round(time.Millisecond), where)
	}
}

func (t *troubles) checkRelay(name string, one relaySample) {
	switch {
	case one.disabled:
		t.raise(relayLags, name, "%s is disabled: its receiver has answered 410", name)
	case one.failing > relayFailuresMax:
		t.raise(relayLags, name, "%s fails, %.0f times in a row", name, one.failing)
	case one.lag > relayLagMax && one.paused:
		t.raise(relayLags, name, "%s is paused, and %v behind", name, seconds(one.lag).Round(time.Second))
	case one.lag > relayLagMax:
		t.raise(relayLags, name, "%s is %v behind", name, seconds(one.lag).Round(time.Second))
	case one.held > relayHeldMax:
		t.raise(relayLags, name, "an open transaction has held up the events for %s for %v", name,
			seconds(one.held).Round(time.Second))
	}
}

func (t *troubles) checkPurchases(f *Fleet, s *Snapshot, r round) {
	// A client that is rate-limited is no trouble of the shop.
	if least := shareMost * s.Rates.Offered; r.gained.overloaded > least {
		t.raise(purchasesShed, "", "%.0f of %.0f a second are answered overloaded",
			r.gained.overloaded, s.Rates.Offered).hold = holdRates
	}
	if s.Rates.Failed > shareMost*s.Rates.Offered {
		fail := t.raise(purchasesFail, "", "%.0f of %.0f a second are answered unavailable or outcome-unknown",
			s.Rates.Failed, s.Rates.Offered)
		fail.hold = holdRates
		if fail.because = t.ofIngress(f.processes, s.Rates.Offered); fail.because != nil {
			fail.because.after = 0 // it explains what is shown now
		}
	}
}

func (t *troubles) checkOrders(f *Fleet, s *Snapshot, r round) {
	if s.Rates.BacklogKnown {
		if t.backlog = append(t.backlog, s.Rates.Backlog); len(t.backlog) > backlogFor {
			t.backlog = t.backlog[1:]
			first, middle := t.backlog[0], t.backlog[backlogFor/2]
			if s.Rates.Backlog >= backlogLeast && s.Rates.Backlog > middle && middle > first {
				t.raise(backlogGrows, "", "%s wait, and they become more", format.Count(s.Rates.Backlog)).hold = holdRates
			}
		} else if s.Rates.Backlog >= backlogLeast {
			grows := t.raise(backlogGrows, "", "%s wait", format.Count(s.Rates.Backlog))
			grows.after = t.now.Sub(grows.begun) + time.Duration(backlogFor+1-len(t.backlog))*roundInterval
		}
		if s.Rates.OldestWaiting > waitsMax {
			t.raise(orderWaits, "", "it has waited for %v", s.Rates.OldestWaiting.Round(time.Second))
		}
	} else {
		t.backlog = nil
	}
	if s.DeadLetters > 0 && s.Postgres.Reachable {
		t.raise(deadLetterParked, "", "%s parked, whose orders have no end yet",
			several(s.DeadLetters, "dead letter is", "dead letters are")).since(f.records.oldestLetter)
	}
	end := func(k *kind, one, more, why string, fresh float64, total *float64) {
		if t.known[k.key("")] == nil {
			*total = 0
		}
		if *total += fresh; fresh > 0 {
			t.raise(k, "", "%s, %s", several(int64(*total), one, more), why).hold = holdEnds
		}
	}
	end(orderRejected, "order", "orders", "about which Redis and Postgres disagreed", r.ended.rejected, &t.ended.rejected)
	end(orderVoided, "order is voided", "orders are voided", "because the stock was rebuilt without them", r.ended.voided,
		&t.ended.voided)
	end(entryLost, "entry", "entries", "whose buyers wait for an order", r.ended.lost, &t.ended.lost)
	for reason := range r.ended.rebuilds {
		rebuilt := t.raise(stockRebuilt, reason, "%s; accepted orders that no worker had read before may be lost",
			Rebuild{Reason: reason}.Because())
		rebuilt.hold, rebuilt.causes = holdEnds, rebuiltAfter[reason]
	}
}

// rebuiltAfter has what explains a rebuild, by its reason.
var rebuiltAfter = map[string][]*kind{rebuild.ReasonRefused: {orderRejected}}

// Because says the reason to people.
func (r Rebuild) Because() string { return cmp.Or(rebuiltBecause[r.Reason], printable(r.Reason)) }

var rebuiltBecause = map[string]string{
	rebuild.ReasonServer:     "Redis was restarted, replaced or emptied",
	rebuild.ReasonUnverified: "no worker had verified this Redis",
	rebuild.ReasonSaleLost:   "Redis had lost a sale",
	rebuild.ReasonUnfinished: "a rebuild was not finished",
	rebuild.ReasonSetBack:    "Redis was set back to an earlier state",
	rebuild.ReasonRefused:    "Postgres refused an order that Redis had accepted",
}

func (t *troubles) checkSales(s *Snapshot) {
	shut := map[string][]*Sale{} // by the reason, without what changes while it lasts, as the step of a rebuild does
	for i := range s.Sales {
		if sale := &s.Sales[i]; sale.Shut != "" {
			why, _, _ := strings.Cut(sale.Shut, ": ")
			shut[why] = append(shut[why], sale)
		}
	}
	for why, sales := range shut {
		more := ""
		if len(sales) > 1 {
			more = fmt.Sprintf(" and %d more", len(sales)-1)
		}
		t.raise(saleShut, why, "%s%s: %s", printable(sales[0].Name), more, sales[0].Shut).after = delayedShut
	}
}

func (t *troubles) checkAudit(f *Fleet, s *Snapshot) {
	if f.records.at.IsZero() || !s.Postgres.Reachable {
		return
	}
	switch since := f.records.auditedSince; {
	case since.IsZero() || t.now.Sub(since) <= auditAgeMax:
	case s.Audit == nil:
		t.raise(auditOld, "", "none was ever recorded").since(since.Add(auditAgeMax))
	default:
		t.raise(auditOld, "", "the newest is %d hours old", int(t.now.Sub(since).Hours())).since(since.Add(auditAgeMax))
	}
	if s.Audit != nil && len(s.Audit.Broken) > 0 {
		t.raise(promiseBroken, "", "%s", strings.Join(s.Audit.Broken, ", ")).since(s.Audit.At)
	}
}

// several is a number with its noun.
func several(n int64, one, more string) string {
	if n == 1 {
		return "1 " + one
	}
	return format.Count(n) + " " + more
}
