package ingress

import (
	"net/http"

	"github.com/labstack/echo/v4"

	"stampede/ingress/apidoc"
	"stampede/internal/accept"
	"stampede/internal/operators"
)

// route is all that is said of a call, but for openapi.yaml, with which a test compares it.
type route struct {
	method, path string
	class        class
	admission    admission
	// isOn is false if this server answers 404.
	isOn  bool
	serve call
}

// isLook reports whether HEAD is served as well. A stream does not end.
func (r *route) isLook() bool { return r.method == http.MethodGet && r.class != streaming }

// call is the handler of a route. Its caller is a user, or the name of an operator; empty if the admission asks for no
// proof.
type call func(c echo.Context, caller string) error

// open is the handler of a call that needs no caller.
func open(h echo.HandlerFunc) call { return func(c echo.Context, _ string) error { return h(c) } }

// class is the class of a call in stampede_http_request_duration_seconds.
type class string

const (
	untimed     class = "" // purchases have a histogram of their own; probes, metrics and pages have none
	orderRead   class = "order-read"
	orderChange class = "order-change"
	saleRead    class = "sale-read"
	operation   class = "operator"
	streaming   class = "event-stream"
)

// admission is what a request passes before it is served, in the order of the fields.
type admission struct {
	// body is nil for defaultBody.
	body *bodyBound
	// limits are those of the address, and those of the user once it is known.
	limits *callLimits
	// yields has a request wait while buyers are served.
	yields bool
	proof  proof
	// action is what an operator has to be allowed.
	action operators.Action
	// refused answers a request without the proof. If it is nil, the answer is the error.
	refused func(c echo.Context, err error) error
	// slot is nil if the handler takes one after the body was read, or none.
	slot *slots
	// byHandler is set if the handler does the rest itself.
	byHandler bool
	// queued is set if what comes late is found by the queue that decides it.
	queued bool
}

// with returns the admission of requests with a longer body.
func (a admission) with(body *bodyBound) admission {
	a.body = body
	return a
}

// proof is how a caller proves who it is.
type proof int

const (
	noProof          proof = iota
	buyer                  // a token, or the header that a gateway sets
	buyerOrTicket          // that, or a ticket for the stream of the order
	ticketIfAny            // a ticket for the stream of the sale, which needs none
	operatorsToken         // of an operator who may take the action
	signatureOfEvent       // of Stripe, which the handler verifies
)

// bodyKey has the bound of a body in the context of a request, unless it is defaultBody.
const bodyKey = "body"

// bodyBound is how many bytes the body of a request may have.
type bodyBound struct {
	bytes    int
	tooLarge *problem
}

var (
	defaultBody = &bodyBound{accept.MaxBodyBytes, problemTooLarge}
	saleBody    = &bodyBound{saleBodyMax, problemSaleTooLarge}
	stripeBody  = &bodyBound{stripeBodyMax, problemStripeTooLarge}
)

const (
	purchasePath = "/v1/sales/:sale/orders"
	paymentsPath = "/v1/payments"
	stripePath   = "/v1/payments/stripe"
)

// table returns all calls.
func (s *Server) table(site *apidoc.Site) []route {
	const (
		get, post = http.MethodGet, http.MethodPost
		always    = true
	)
	limits, inFlight := s.limits, &s.inFlight
	sales, draws, orders, purchases := s.sales, s.draws, &orderService{s.core}, &purchaseService{s.core, s.sales}
	waitlists := newWaitlistService(s.core, s.sales, draws.entrants)
	operate := &operatorService{s.core, s.sales}
	stripe := &stripeService{operatorService: operate}
	pause, resume, end := s.config.Sales.Pause, s.config.Sales.Resume, s.config.Sales.End
	html := pageHeaders()
	html.Set("Content-Security-Policy", site.ContentSecurityPolicy)

	purchase := admission{proof: buyer, byHandler: true, queued: true}
	newcomer := admission{limits: &limits.purchases, proof: buyer}
	owner := admission{limits: &limits.orders, proof: buyer}
	watcher := admission{limits: &limits.orders, proof: buyerOrTicket}
	anyone := admission{limits: &limits.others, yields: true, slot: &inFlight.sales}
	visitor := admission{limits: &limits.others, proof: ticketIfAny}
	stranger := admission{limits: &limits.others}
	inLine := admission{limits: &limits.others, yields: true}
	may := func(action operators.Action) admission {
		return admission{limits: &limits.others, proof: operatorsToken, action: action, slot: &inFlight.operators}
	}
	settle, alter, draw := may(operators.SettlePayment), may(operators.ChangeSale), may(operators.DrawSale)
	// Looks have slots of their own, so that they keep no operator from pausing a sale.
	look := may(operators.Look)
	look.slot = &inFlight.looks
	// A shop's server reports the payments of all buyers, so its address has limits only while it shows no valid token.
	shop := admission{proof: operatorsToken, action: operators.ReportPayment, refused: operate.refuseReport}
	provider := admission{body: stripeBody, proof: signatureOfEvent, byHandler: true}
	// A full server can be monitored.
	monitor := admission{}

	drawn, paid, byStripe := s.config.Draws != nil, s.config.BuyerPay == SwitchOn, s.config.StripeSecretsFile != ""
	return []route{
		{post, purchasePath, untimed, purchase, always, open(purchases.serve)},
		{post, "/v1/sales/:sale/waitlist", orderChange, newcomer, drawn, waitlists.join},
		{get, "/v1/sales/:sale/waitlist", orderRead, owner, drawn, waitlists.show},
		{post, "/v1/sales/:sale/waitlist/leave", orderChange, owner, drawn, waitlists.leave},

		{get, "/v1/orders", orderRead, owner, always, orders.list},
		{get, "/v1/orders/:order", orderRead, owner, always, orders.show},
		{post, "/v1/orders/:order/pay", orderChange, owner, paid, orders.pay},
		{post, "/v1/orders/:order/cancel", orderChange, owner, always, orders.cancel},
		{get, "/v1/orders/:order/events", streaming, watcher, always, orders.stream},
		{post, "/v1/orders/:order/events/ticket", streaming, owner, always, orders.createTicket},

		{get, "/v1/sales", saleRead, anyone, always, open(sales.list)},
		{get, "/v1/sales/:sale", saleRead, anyone, always, open(sales.show)},
		{get, "/v1/sales/:sale/events", streaming, visitor, always, open(sales.stream)},
		{post, "/v1/sales/:sale/events/ticket", streaming, stranger, always, open(sales.createTicket)},

		{post, "/v1/sales", operation, may(operators.CreateSale).with(saleBody), always, operate.createSale},
		{post, "/v1/sales/:sale/pause", operation, alter, always, operate.change(pause)},
		{post, "/v1/sales/:sale/resume", operation, alter, always, operate.change(resume)},
		{post, "/v1/sales/:sale/end", operation, may(operators.EndSale), always, operate.change(end)},
		{post, "/v1/sales/:sale/restock", operation, alter, always, operate.restockSale},
		{post, "/v1/sales/:sale/rename", operation, alter.with(saleBody), always, operate.renameSale},
		{get, "/v1/admin/sales/:sale/history", operation, look, always, operate.showSaleHistory},
		{get, "/v1/admin/orders", operation, look, always, operate.listOrders},
		{get, "/v1/admin/orders/:order", operation, look, always, operate.showOrder},
		{post, "/v1/admin/orders/:order/cancel", operation, may(operators.CancelOrder), always, operate.cancelOrder},

		{post, paymentsPath, orderChange, shop, always, operate.reportPayment},
		{post, stripePath, orderChange, provider, byStripe, open(stripe.serve)},
		{get, "/v1/admin/payments", operation, look, always, operate.listPayments},
		{post, "/v1/admin/payments/:reference/refunded", operation, settle, always, operate.noteRefund},
		{post, "/v1/admin/payments/:reference/dismissed", operation, settle, always, operate.dismissPayment},

		{post, "/v1/sales/:sale/draw", operation, draw, drawn, draws.create},
		{post, "/v1/sales/:sale/draw/open", operation, draw, drawn, draws.open},
		{get, "/v1/sales/:sale/draw", saleRead, anyone, drawn, open(draws.show)},
		{get, "/v1/sales/:sale/draw/bundle", saleRead, stranger, drawn, open(draws.download(draws.bundle))},
		{get, "/v1/sales/:sale/draw/leaves", saleRead, stranger, drawn, open(draws.download(draws.leaves))},
		{get, "/v1/sales/:sale/draw/proof", saleRead, inLine, drawn, open(draws.prove)},
		{post, "/v1/sales/:sale/draw/beacon", operation, inLine, drawn, open(draws.takeBeacon)},
		{post, "/v1/sales/:sale/draw/reveal", operation, inLine, drawn, open(draws.takeSecret)},

		{get, "/livez", untimed, monitor, always, open(s.health.live)},
		{get, "/readyz", untimed, monitor, always, open(s.health.ready)},
		{get, "/metrics", untimed, monitor, always, open(echo.WrapHandler(s.metrics.handler()))},
		{get, "/openapi.yaml", untimed, anyone, always, open(showPage(site.YAML, pageHeaders()))},
		{get, "/openapi.json", untimed, anyone, always, open(showPage(site.JSON, pageHeaders()))},
		{get, "/docs", untimed, anyone, always, open(showPage(site.Docs, html))},
		{get, "/problems", untimed, anyone, always, open(showPage(site.Problems, html))},
		{get, "/problems/:slug", untimed, anyone, always, open(showProblem(site))},
	}
}
