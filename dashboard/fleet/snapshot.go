package fleet

import (
	"encoding/json"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"

	"stampede/ledger/draws"
	"stampede/reservation"
	"stampede/reservation/catalog"
)

// Snapshot is the installation at one moment. It is never changed once it is published.
type Snapshot struct {
	// Number grows by one with each snapshot.
	Number uint64    `json:"number"`
	At     time.Time `json:"at"`

	Postgres Server `json:"postgres"`
	Redis    Server `json:"redis"`
	// RedisNodes are its servers: one, or the masters of a cluster. Redis is reachable if one of them answers.
	RedisNodes []RedisNode `json:"redis_nodes"`
	// Processes are the scraped ones, in the order of their targets.
	Processes []Process `json:"processes"`
	// Troubles are what is wrong now, the worst first. What one of them explains stands under it.
	Troubles []Trouble `json:"troubles"`
	// Pending are those that have not lasted long enough yet, and that none of Troubles explains.
	Pending []Pending `json:"pending"`
	// Sales are at most 50: those where something happens, then open, paused, scheduled and ended ones, each newest
	// first. SalesRead is false if neither server answered: Sales is then the last that was read, as of SalesAt.
	Sales     []Sale    `json:"sales"`
	SalesRead bool      `json:"sales_read"`
	SalesAt   time.Time `json:"sales_at"`
	// Rates are the sums over all processes.
	Rates Rates `json:"rates"`
	// Payments are the payments of all sales, Unpaid the orders of the followed ones that wait for them.
	Payments MoneyRates `json:"payments"`
	Unpaid   *Unpaid    `json:"unpaid,omitempty"`
	// DeadLetters counts the parked ones.
	DeadLetters int64 `json:"dead_letters"`
	// Rebuilds are those under way.
	Rebuilds []Rebuild `json:"rebuilds"`
	// Audit is the newest recorded audit, nil if there is none.
	Audit *Audit `json:"audit,omitempty"`

	// unlooked is true before the first look at all that changes slowly.
	unlooked bool
}

// Server is what is known of Redis or Postgres.
type Server struct {
	Reachable bool      `json:"reachable"`
	Since     time.Time `json:"since"` // when Reachable became what it is
	Error     string    `json:"error,omitempty"`
}

// RedisNode is a server of Redis.
type RedisNode struct {
	// Name is its address, or the name of the master at its Sentinels.
	Name string `json:"name"`
	Server
	// UsedBytes is its memory in use, MaxBytes its maxmemory, 0 if that is unlimited. Both are 0 while it does not
	// answer.
	UsedBytes int64 `json:"used_bytes"`
	MaxBytes  int64 `json:"max_bytes"`
}

// AllTroubles are the troubles, each followed by its consequences.
func (s *Snapshot) AllTroubles() (all []Trouble) {
	for _, t := range s.Troubles {
		all = append(append(all, t), t.Consequences...)
	}
	return all
}

// NoWorker is true if no worker answers.
func (s *Snapshot) NoWorker() bool {
	return slices.ContainsFunc(s.AllTroubles(), func(t Trouble) bool { return t.Key == noWorker.key("") })
}

// noneReady says why no ingress that is up takes purchases: "" if one does, or none is up.
func (s *Snapshot) noneReady() (why string) {
	for i := range s.Processes {
		if p := &s.Processes[i]; p.Up && strings.Contains(p.Kind, "ingress") {
			if p.NotReady == "" {
				return ""
			}
			why = p.NotReady
		}
	}
	return why
}

// Process is one scraped process.
type Process struct {
	Target string `json:"target"` // the URL of its metrics, without user and password
	// Kind is ingress, worker, relay or a combination such as "ingress, worker, relay" (stampede dev); empty before the
	// first scrape.
	Kind string `json:"kind"`
	// Up is false while the target does not answer; the figures are then those of LastSeen, and are not in any sum.
	Up       bool      `json:"up"`
	Since    time.Time `json:"since"`            // when Up, or whether it is ready, became what it is
	Started  time.Time `json:"started,omitzero"` // zero if it is not known
	LastSeen time.Time `json:"last_seen"`        // zero if never
	Error    string    `json:"error,omitempty"`
	// NotReady says why an ingress that is up takes no purchases: "" if it does.
	NotReady string `json:"not_ready,omitempty"`
	Version  string `json:"version,omitempty"`

	// CPU, in cores, and PerSecond are over the last seconds. RatesKnown is false before the second scrape.
	CPU           float64 `json:"cpu"`
	RatesKnown    bool    `json:"rates_known"`
	MemoryBytes   float64 `json:"memory_bytes"`
	Connections   float64 `json:"connections"`
	InFlight      float64 `json:"in_flight"`
	InFlightLimit float64 `json:"in_flight_limit"`
	// PerSecond is what the process does most: purchases answered by an ingress, orders recorded by a worker, events
	// delivered by a relay.
	PerSecond float64 `json:"per_second"`
	// Readers are the streams that a worker reads.
	Readers []string `json:"readers,omitempty"`
	// Idle says why a worker that is up reads none: "" if it does.
	Idle string `json:"idle,omitempty"`
	// Failing are the steps that fail and are retried.
	Failing []string `json:"failing,omitempty"`
}

// Severity says how urgent a trouble is.
type Severity string

// The severities.
const (
	Critical Severity = "critical" // buyers notice, or a promise is in danger
	Warning  Severity = "warning"  // it becomes critical if nobody acts
)

// Trouble is one thing that is wrong now.
type Trouble struct {
	// Name is that of its alert. Text begins with the summary of the alert.
	Name     string   `json:"name"`
	Severity Severity `json:"severity"`
	Text     string   `json:"text"`
	// Key tells it from the other troubles for as long as it lasts.
	Key   string    `json:"-"`
	Since time.Time `json:"since"`
	// Runbook is the anchor of its section in docs/runbook.md: the name in lower case with hyphens.
	Runbook string `json:"runbook"`
	// Consequences are the troubles that this one explains. They have none in turn.
	Consequences []Trouble `json:"consequences,omitempty"`
}

// Sale is one sale with its units and its rates.
type Sale struct {
	ID                uuid.UUID         `json:"id"`
	reservation.Terms `json:"-"`        // MarshalJSON writes them
	State             reservation.State `json:"state"`

	// Stock = Available + Held + Sold where UnitsKnown; else these are unknown, because Redis or Postgres does not
	// answer, or the sale is shut for a rebuild.
	Stock int64 `json:"stock"`
	// EntryFor is the sale whose units are offered to those who enter this one; uuid.Nil for all others.
	EntryFor   uuid.UUID `json:"entry_for,omitzero"`
	Available  int64     `json:"available"`
	Held       int64     `json:"held"`
	Sold       int64     `json:"sold"`
	UnitsKnown bool      `json:"units_known"`
	// uncounted is true if the next looks will count the units.
	uncounted bool
	// Items are those of the sale, with what is left of each where UnitsKnown.
	Items []catalog.CountedItem `json:"items,omitempty"`
	// Shut says why the sale sells nothing although it is open: "" if it sells.
	Shut string `json:"shut,omitempty"`

	// OffersOnly is true while its units are offered to those who entered, and nobody else buys. DrawState is that of the
	// draw of its units, "" if they are not drawn.
	OffersOnly bool        `json:"offers_only,omitempty"`
	DrawState  draws.State `json:"draw,omitempty"`

	// Rates are those of this sale: Offered to Failed only. RatesKnown is false if no ingress that answers counts by
	// sale.
	Rates      Rates `json:"rates"`
	RatesKnown bool  `json:"rates_known"`
	// Funnel counts the orders of the sale in Postgres by what became of them; FunnelKnown is false before the first
	// look. FunnelAt is when they were counted: the more orders, the less often.
	Funnel      Funnel    `json:"funnel"`
	FunnelKnown bool      `json:"funnel_known"`
	FunnelAt    time.Time `json:"funnel_at,omitzero"`
	// Unpaid are the orders that wait for money: nil if they do not, or were not counted.
	Unpaid *Unpaid `json:"unpaid,omitempty"`
}

// What an open sale may be instead.
const SoldOut, NotSelling = "sold out", "not selling"

// Status is what buyers meet: the state, SoldOut, or NotSelling if the sale is Shut.
func (s Sale) Status() string {
	switch {
	case s.State != reservation.StateOpen:
		return string(s.State)
	case s.Shut != "":
		return NotSelling
	case s.UnitsKnown && s.Available == 0 && s.EntryFor == uuid.Nil:
		return SoldOut
	}
	return string(s.State)
}

// NewSale returns a sale without its units and rates.
func NewSale(c *catalog.CountedSale) Sale {
	sale := Sale{
		ID: c.ID, Terms: c.Terms, State: c.State, Stock: c.Stock, EntryFor: c.EntryFor,
		// The sale in which people wait is not one that is offered.
		OffersOnly: c.OffersOnly && c.EntryFor == uuid.Nil,
	}
	for _, item := range c.Sale.Items {
		sale.Items = append(sale.Items, catalog.CountedItem{Item: item})
	}
	return sale
}

// SetUnits sets the units as they were counted. Entries of a draw and places of a waiting list are no stock: there are
// as many as people have.
func (s *Sale) SetUnits(c *catalog.CountedSale) {
	s.Stock, s.Available, s.Held, s.Sold, s.UnitsKnown = c.Stock, c.Available, c.Held, c.Sold, true
	if s.EntryFor != uuid.Nil {
		s.Stock, s.Available = c.Held+c.Sold, 0
	}
}

// MarshalJSON writes the status and the terms too, as the HTTP API does.
func (s Sale) MarshalJSON() ([]byte, error) {
	type plain Sale
	type terms struct{ reservation.TermsView } // a level deeper than the stock and the items of the sale
	return json.Marshal(struct {
		terms
		plain
		Status string `json:"status"`
	}{terms{s.Terms.View()}, plain(s), s.Status()})
}

// Funnel counts orders.
type Funnel struct {
	Accepted  int64 `json:"accepted"` // all orders
	Confirmed int64 `json:"confirmed"`
	Paid      int64 `json:"paid"`
	Cancelled int64 `json:"cancelled"`
	Expired   int64 `json:"expired"`
	Rejected  int64 `json:"rejected"`
	Voided    int64 `json:"voided"`
}

// Rates are figures of the last second. Those per second are sums of the increases of each process; a process that
// restarts counts from zero, and one that is gone adds nothing.
type Rates struct {
	// Offered = Accepted + Refused + Shed + Failed purchases, per second. Shed ones were answered overloaded or
	// rate-limited, failed ones unavailable or outcome-unknown.
	Offered  float64 `json:"offered"`
	Accepted float64 `json:"accepted"`
	Refused  float64 `json:"refused"`
	Shed     float64 `json:"shed"`
	Failed   float64 `json:"failed"`
	// Durable is orders recorded in Postgres per second.
	Durable float64 `json:"durable"`
	// PurchasesKnown is false, and the purchases are 0, if no ingress has answered two scrapes in a row; so it is with
	// DurableKnown and workers.
	PurchasesKnown bool `json:"purchases_known"`
	DurableKnown   bool `json:"durable_known"`

	// Quantiles of the last ten seconds; 0 if there was nothing to measure. In JSON all times are in seconds, and their
	// names say so: answer_p50_seconds.
	AnswerP50  time.Duration `json:"-"`
	AnswerP99  time.Duration `json:"-"`
	DurableP50 time.Duration `json:"-"` // from accepted to recorded in Postgres
	DurableP99 time.Duration `json:"-"`

	// Backlog is the accepted orders that are not in Postgres, OldestWaiting the age of the oldest one. Both are those
	// of all streams; BacklogKnown is false if no worker could say.
	Backlog       int64         `json:"backlog"`
	OldestWaiting time.Duration `json:"-"`
	BacklogKnown  bool          `json:"backlog_known"`
}

// MarshalJSON writes times in seconds.
func (r Rates) MarshalJSON() ([]byte, error) {
	type plain Rates
	return json.Marshal(struct {
		plain
		AnswerP50     float64 `json:"answer_p50_seconds"`
		AnswerP99     float64 `json:"answer_p99_seconds"`
		DurableP50    float64 `json:"durable_p50_seconds"`
		DurableP99    float64 `json:"durable_p99_seconds"`
		OldestWaiting float64 `json:"oldest_waiting_seconds"`
	}{
		plain(r), r.AnswerP50.Seconds(), r.AnswerP99.Seconds(), r.DurableP50.Seconds(), r.DurableP99.Seconds(),
		r.OldestWaiting.Seconds(),
	})
}

// Rebuild is a rebuild of stock in Redis that is under way.
type Rebuild struct {
	Partition int       `json:"partition"`
	Sale      uuid.UUID `json:"sale,omitzero"` // nil for the whole partition
	Reason    string    `json:"reason"`
	Since     time.Time `json:"since"`
	Step      string    `json:"step"`
	// SalesDone of SalesTotal are rebuilt; SalesTotal is 0 before they are counted.
	SalesDone  int `json:"sales_done"`
	SalesTotal int `json:"sales_total"`
}

// Audit is the verdict of a recorded audit.
type Audit struct {
	At       time.Time `json:"at"`
	Operator string    `json:"operator"`
	// Broken and Unchecked are names of promises, such as S4. What was found while units moved is unchecked.
	Broken    []string `json:"broken"`
	Unchecked []string `json:"unchecked"`
}

// Point is one second of the history: the rates of all processes, and for each sale its rates and units.
type Point struct {
	At    time.Time               `json:"at"`
	Rates Rates                   `json:"rates"`
	Sales map[uuid.UUID]SalePoint `json:"sales"`
}

// SalePoint is a sale in one second of the history.
type SalePoint struct {
	Rates     Rates `json:"rates"`
	Available int64 `json:"available"`
	Held      int64 `json:"held"`
	Sold      int64 `json:"sold"`
	Known     bool  `json:"known"`
}

// Pending is something that was seen, and is a trouble if it lasts until Due.
type Pending struct {
	Trouble
	Due time.Time `json:"due"`
}

// unexplained are the pending ones that no trouble explains, the first due first.
func unexplained(pending, shown []*lasting) []Pending {
	all := []Pending{}
	for _, one := range pending {
		isCause := func(of *lasting) bool { return !of.ofOne && slices.Contains(one.causes, of.kind) }
		if !slices.ContainsFunc(shown, isCause) && !slices.Contains(shown, one.because) {
			all = append(all, Pending{Trouble: one.trouble(), Due: one.begun.Add(one.after)})
		}
	}
	slices.SortFunc(all, func(a, b Pending) int { return a.Due.Compare(b.Due) })
	return all
}

// IsMeasured is true if all processes that answer have answered twice.
func (s *Snapshot) IsMeasured() bool {
	return !slices.ContainsFunc(s.Processes, func(p Process) bool { return p.Up && !p.RatesKnown })
}

// IsSettled is true if a later snapshot says no more of the same state: all is looked at and all units are counted that
// can be, and nothing pending is due until then.
func (s *Snapshot) IsSettled(until time.Time) bool {
	return !s.unlooked && !slices.ContainsFunc(s.Sales, func(sale Sale) bool { return sale.uncounted }) &&
		!slices.ContainsFunc(s.Pending, func(p Pending) bool { return p.Due.Before(until) })
}

// kind is what can be wrong: the one list that pages, `stampede top` and the alerts of Prometheus share. The tests
// compare deploy/prometheus with it, and docs/runbook.md, which has a section for each name.
type kind struct {
	// name is that of the alert.
	name     string
	severity Severity
	// summary begins the text of the trouble, and is the summary of the alert.
	summary string
	// causes explain it while they last: the first of them that is seen. None is its consequence in turn.
	causes []*kind
}

// kinds are all of them.
var kinds []*kind

func newKind(name string, severity Severity, summary string, causes ...*kind) *kind {
	k := &kind{name, severity, summary, causes}
	kinds = append(kinds, k)
	return k
}

var (
	postgresGone = newKind("PostgresGone", Critical, "Postgres does not answer, or takes no writes")
	redisGone    = newKind("RedisGone", Critical, "Redis does not answer")
	redisFull    = newKind("RedisMemory", Critical, "Redis is full, or nearly")
	redisFills   = newKind("RedisMemory", Warning, "Redis fills up")
	redisNoLog   = newKind("RedisSync", Critical, "Redis does not log its writes")
	redisSlow    = newKind("RedisSync", Warning, "The disk of Redis is slow")

	keySetGone = newKind("KeySetFaulty", Critical, "No key verifies the tokens of buyers")
	keySetOld  = newKind("KeySetFaulty", Warning, "The key set of the buyers' tokens cannot be fetched", keySetGone)

	noIngress = newKind("NoIngress", Critical, "No ingress takes purchases", redisGone, keySetGone, redisFull)
	notReady  = newKind("IngressNotReady", Warning, "An ingress takes no purchases", noIngress, redisGone, keySetGone,
		redisFull)
	noWorker   = newKind("NoWorker", Critical, "No worker records orders", redisGone)
	targetGone = newKind("TargetGone", Warning, "A process cannot be watched")

	saleShut = newKind("SaleShut", Critical, "A sale sells nothing",
		redisGone, noIngress, postgresGone, noWorker, redisFull)
	purchasesFail = newKind("PurchasesFail", Critical, "Purchases fail", redisGone, redisFull, saleShut)
	purchasesShed = newKind("PurchasesShed", Critical, "Purchases are turned away", redisGone)
	backlogGrows  = newKind("BacklogGrows", Warning, "Orders arrive faster than they are recorded",
		postgresGone, redisGone, noWorker)
	orderWaits = newKind("OrderWaits", Critical, "An accepted order is not recorded",
		postgresGone, redisGone, noWorker)
	stepFails = newKind("StepFails", Warning, "A step of the workers fails and is retried",
		postgresGone, redisGone)
	releasesWait = newKind("ReleasesWait", Warning, "Units of ended orders are not on sale again",
		redisGone, postgresGone, noWorker)
	guardOld  = newKind("GuardOld", Warning, "Redis is not compared with Postgres", postgresGone, redisGone)
	noRelay   = newKind("NoRelay", Critical, "No relay tells the shop of orders", postgresGone, redisGone)
	relayLags = newKind("RelayLags", Warning, "A target gets its events late", postgresGone, noRelay)

	drawWaits        = newKind("DrawWaits", Critical, "A draw waits", postgresGone, redisGone, noWorker)
	drawVoid         = newKind("DrawVoid", Critical, "A draw is void")
	offersUnanswered = newKind("OffersUnanswered", Warning, "Offers end unanswered")

	paymentsRefused = newKind("PaymentsRefused", Critical, "Money is reported and does not settle", postgresGone)

	refundDue    = newKind("RefundDue", Warning, "A refund is due for more than a day")
	paymentWaits = newKind("PaymentWaits", Warning, "A payment waits for its order",
		postgresGone, redisGone, noWorker)
	paymentUnclear  = newKind("PaymentUnclear", Warning, "A payment is unclear for more than an hour")
	paymentDisputed = newKind("PaymentDisputed", Warning, "A payer asks the bank for the money")

	deadLetterParked = newKind("DeadLetterParked", Warning, "An entry waits for an operator")
	orderRejected    = newKind("OrderRejected", Critical, "Accepted orders were rejected")
	orderVoided      = newKind("OrderVoided", Critical, "Accepted orders were lost")
	stockRebuilt     = newKind("StockRebuilt", Warning, "The stock was rebuilt")
	entryLost        = newKind("EntryLost", Critical, "Entries were deleted before they were handled")
	orderSetAside    = newKind("OrderSetAside", Warning, "An order contradicts its log")
	auditOld         = newKind("AuditOld", Warning, "No audit for a day")
	promiseBroken    = newKind("PromiseBroken", Critical, "An audit found a broken promise")
	clocksApart      = newKind("ClocksApart", Warning, "Clocks are apart")
	operatorsFile    = newKind("OperatorsFileFaulty", Warning, "The operators' file is not in force")
	receiptsRefused  = newKind("ReceiptsRefused", Critical, "Ingresses have different secrets for receipts")
)

var capital = regexp.MustCompile(`([a-z])([A-Z])`)

// runbook is the anchor of its section in docs/runbook.md.
func (k *kind) runbook() string { return strings.ToLower(capital.ReplaceAllString(k.name, "$1-$2")) }
