package fleet

import (
	"regexp"
	"strings"
)

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
