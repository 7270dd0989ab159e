package ingress

import (
	"encoding/json"
	"slices"
	"strconv"
	"strings"

	"stampede/reservation/order"
)

// stripeOutcome is what became of a message at Stripe's endpoint.
type stripeOutcome string

const (
	stripeKept       stripeOutcome = "kept"
	stripeRefused    stripeOutcome = "refused"
	stripeOverloaded stripeOutcome = "overloaded" // its place went to another

	stripeNoEvent   stripeOutcome = "no-event"
	stripeThin      stripeOutcome = "thin-event"
	stripeOtherType stripeOutcome = "other-type"
	stripeTestMode  stripeOutcome = "test-mode"
	stripeUnpaid    stripeOutcome = "unpaid"
	stripeFree      stripeOutcome = "free"
	stripeNoOrder   stripeOutcome = "no-order"
	stripeNoRefund  stripeOutcome = "no-refund"
	stripeUnknown   stripeOutcome = "unknown-payment"
	stripeArchived  stripeOutcome = "archived"
)

// stripeIgnored says why a signed message is not kept. Its answer is 200: Stripe would repeat it for days.
var stripeIgnored = map[stripeOutcome]string{
	stripeNoEvent:   "The body is not an event of Stripe, or names no payment.",
	stripeThin:      "A thin event does not have the payment. Create the endpoint in Stripe with the payload style snapshot.",
	stripeOtherType: "Events of this type report no payment, no refund and no dispute.",
	stripeTestMode:  "The payment was made in a test mode of Stripe. STAMPEDE_STRIPE_TEST_MODE=on takes such payments.",
	stripeUnpaid:    "The session is not paid yet.",
	stripeFree:      "The session required no payment, so there is no money.",
	stripeNoOrder:   "Its metadata name no order, under the name in STAMPEDE_STRIPE_METADATA (order_id).",
	stripeNoRefund:  "No money that was received has gone back: an authorization was released.",
	stripeUnknown:   "The payment was not reported here. It may be that of another sale of the account.",
	stripeArchived:  "The payment is archived with its sale, and cannot be changed any more.",
}

// stripePowers has the currencies that Stripe counts in another unit than ISO 4217, by the power of ten between them.
// It counts krónur of Iceland and shillings of Uganda in hundredths, which they no longer have, and ariary of
// Madagascar whole (https://docs.stripe.com/currencies#minor-units).
var stripePowers = map[string]string{"ISK": "e-2", "UGX": "e-2", "MGA": "e2"}

// stripeNews is what an event says: that money came, that it went back, or that its payer disputes it.
type stripeNews struct {
	order.Money
	// refund has a RefundReference, and dispute an ID, if the event is of one.
	refund  order.ProviderRefund
	dispute order.Dispute
}

// readEvent reads what an event says. All events of a payment have the reference of its PaymentIntent, so that the
// money counts once. Money without an order in its metadata is ignored: an account may sell more than what is here, and
// a PaymentIntent does not get the metadata of its session.
//
// It takes events of all versions of the API since 2023. A member of another type than Stripe's is like none.
func (s *stripeService) readEvent(event []byte) (news stripeNews, outcome stripeOutcome) {
	e := order.ReadMembers(event)
	object := order.ReadMembers(order.ReadMembers(e["data"])["object"])
	kind := stripeText(e["type"])
	references, amount := []string{stripeID(object["id"]), stripeID(e["id"])}, object["amount_received"]
	switch kind {
	case "checkout.session.completed", "checkout.session.async_payment_succeeded":
		switch stripeText(object["payment_status"]) {
		case "paid":
		case "no_payment_required":
			return news, stripeFree
		default:
			return news, stripeUnpaid
		}
		references, amount = slices.Insert(references, 0, stripeID(object["payment_intent"])), object["amount_total"]
	case "payment_intent.succeeded":
	case "charge.refunded":
		references = []string{stripeID(object["payment_intent"]), stripeID(object["id"])}
		amount = object["amount"]
	case "charge.dispute.created", "charge.dispute.updated", "charge.dispute.closed", "charge.dispute.funds_withdrawn",
		"charge.dispute.funds_reinstated":
		references = []string{stripeID(object["payment_intent"]), stripeID(object["charge"])}
	case "":
		return news, stripeNoEvent
	default:
		if stripeText(e["object"]) == "v2.core.event" {
			return news, stripeThin
		}
		return news, stripeOtherType
	}
	if s.config.StripeTestMode != SwitchOn && (string(e["livemode"]) == "false" || string(object["livemode"]) == "false") {
		return news, stripeTestMode
	}
	named := order.ReadMembers(object["metadata"])[s.config.StripeMetadata]
	if text := string(named); text == "null" || text == `""` {
		named = nil
	}
	if named == nil && !strings.HasPrefix(kind, "charge.") {
		return news, stripeNoOrder
	}
	currency := object["currency"]
	// Sessions from before Basil, whose buyer has paid in another currency, have the sum that the shop asked for here.
	// Later ones have it as their amount, and what the buyer has paid in presentment_details.
	if asked := order.ReadMembers(object["currency_conversion"]); asked != nil {
		amount, currency = asked["amount_total"], asked["source_currency"]
	}
	var err error
	for _, reference := range references {
		news.Money, err = order.Report{
			Reference: json.RawMessage(strconv.Quote(reference)), OrderID: named,
			Amount: stripeAmount(amount, stripeText(currency)), Currency: currency,
		}.Money()
		if err == nil {
			break
		}
	}
	if err != nil {
		return news, stripeNoEvent
	}
	// Ids of orders have version 7. Those of another system may be any, and its money must not be sent back.
	if news.OrderID.Version() != 7 {
		news.Unclear = order.UnclearOrder
	}
	switch {
	case kind == "charge.refunded":
		return news.refunded(object)
	case strings.HasPrefix(kind, "charge."):
		return news.disputed(object)
	}
	return news, stripeKept
}

// refunded reads how much of a charge went back. Stripe counts what it has never captured as refunded, though nobody
// has received it. The latest refund is the first of the list, which a charge does not have since 2022-11-15: then the
// refund has the name of the charge.
func (n stripeNews) refunded(charge map[string]json.RawMessage) (stripeNews, stripeOutcome) {
	sum := func(name string) int64 {
		money, _ := order.Report{ // a number that cannot be read is 0
			Reference: json.RawMessage(strconv.Quote(n.Reference)), Amount: stripeAmount(charge[name], n.Currency),
		}.Money()
		return money.Amount
	}
	n.refund = order.ProviderRefund{
		Money: n.Money, RefundReference: stripeText(charge["id"]), Refunded: sum("amount_refunded"), By: "stripe",
	}
	if charge["amount_captured"] != nil {
		n.refund.Amount = sum("amount_captured")
		n.refund.Refunded -= n.Amount - n.refund.Amount
	}
	var latest []struct {
		ID string `json:"id"`
	}
	_ = json.Unmarshal(order.ReadMembers(charge["refunds"])["data"], &latest) // else there is none
	if len(latest) > 0 {
		n.refund.RefundReference = latest[0].ID
	}
	switch {
	case order.ValidateRefundReference(n.refund.RefundReference) != nil:
		return n, stripeNoEvent
	case n.refund.Refunded <= 0 || n.refund.Amount <= 0:
		return n, stripeNoRefund
	}
	return n, stripeKept
}

func (n stripeNews) disputed(dispute map[string]json.RawMessage) (stripeNews, stripeOutcome) {
	n.dispute = order.Dispute{Reference: n.Reference, ID: stripeText(dispute["id"])}
	switch stripeText(dispute["status"]) {
	case "won", "warning_closed":
		n.dispute.State = order.DisputeWon
	case "lost":
		n.dispute.State = order.DisputeLost
	}
	if order.ValidateReference(n.dispute.ID) != nil {
		return n, stripeNoEvent
	}
	return n, stripeKept
}

// stripeAmount returns Stripe's number in the units of ISO 4217. A number that is none there stays unreadable.
func stripeAmount(number json.RawMessage, currency string) json.RawMessage {
	power := stripePowers[strings.ToUpper(currency)]
	if power == "" || strings.IndexAny(string(number), "-0123456789") != 0 {
		return number
	}
	return slices.Concat(number, []byte(power))
}

func stripeText(value json.RawMessage) (text string) {
	_ = json.Unmarshal(value, &text) // anything else is like none
	return text
}

// stripeID reads the id of an object, which stands for it unless it is expanded.
func stripeID(value json.RawMessage) string {
	if object := order.ReadMembers(value); object != nil {
		value = object["id"]
	}
	return stripeText(value)
}
