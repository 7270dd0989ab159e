package order_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/reservation/order"
)

// steps are all legal transitions.
const steps = `
	          OrderReserved  reserved
	reserved  OrderConfirmed confirmed
	reserved  OrderRejected  rejected
	reserved  OrderVoided    voided
	confirmed OrderPaid      paid
	confirmed OrderCancelled cancelled
	confirmed OrderExpired   expired
	paid      OrderCancelled cancelled
`

func TestTransitions(t *testing.T) {
	t.Parallel()
	allowed := map[string]string{}
	for line := range strings.Lines(strings.TrimSpace(steps)) {
		f := strings.Fields(line)
		if len(f) == 2 {
			f = append([]string{""}, f...)
		}
		allowed[f[0]+" "+f[1]] = f[2]
	}
	require.Len(t, allowed, 8)
	for _, from := range []order.Status{
		"", order.StatusReserved, order.StatusConfirmed, order.StatusRejected, order.StatusPaid,
		order.StatusCancelled, order.StatusExpired, order.StatusVoided, "nonsense",
	} {
		for _, event := range []order.EventType{
			order.EventReserved, order.EventConfirmed, order.EventRejected, order.EventVoided, order.EventPaid,
			order.EventCancelled, order.EventExpired, "OrderForgotten",
		} {
			to, ok := from.After(event)
			want, wanted := allowed[string(from)+" "+string(event)]
			require.Equal(t, wanted, ok, "%s after %s", event, from)
			require.EqualValues(t, want, to, "%s after %s", event, from)
		}
	}
}

func TestLastVersion(t *testing.T) {
	t.Parallel()
	require.Equal(t, 4, order.LastVersion(), "reserved, confirmed, paid, and cancelled by an operator")
}

func TestConfirmedAndPaidOrdersAreLive(t *testing.T) {
	t.Parallel()
	for status, live := range map[order.Status]bool{
		"reserved": false, "confirmed": true, "rejected": false, "paid": true, "cancelled": false, "expired": false,
		"voided": false,
	} {
		require.Equal(t, live, status.Live(), status)
	}
}

func TestBuyerTransitions(t *testing.T) {
	t.Parallel()
	var (
		illegal = order.ErrIllegalTransition
		expired = order.ErrExpired
		same    = "same" // nothing changes, without an error
	)
	due := time.Now()
	entry := order.Order{Status: "confirmed", EntryFor: uuid.New()}
	paidEntry := order.Order{Status: "paid", EntryFor: uuid.New()}
	awaits, paid := order.Order{Status: "confirmed", ExpiresAt: due}, order.Order{Status: "paid", PaymentReference: "ref"}
	for name, c := range map[string]struct {
		order   order.Order
		overdue bool
		pay     order.PaymentReason // empty if the money settles
		cancel  any                 // a status, same, or the error
	}{
		"in time":                       {awaits, false, "", "cancelled"},
		"overdue":                       {awaits, true, order.RefundOrderExpired, expired},
		"no payment window":             {order.Order{Status: "confirmed"}, false, "", illegal},
		"an entry":                      {entry, false, "", "cancelled"},
		"a paid entry":                  {paidEntry, false, order.RefundAlreadyPaid, illegal},
		"paid":                          {paid, false, order.RefundAlreadyPaid, illegal},
		"paid, after the deadline":      {paid, true, order.RefundAlreadyPaid, illegal},
		"cancelled":                     {order.Order{Status: "cancelled"}, false, order.RefundOrderCancelled, same},
		"cancelled, after the deadline": {order.Order{Status: "cancelled"}, true, order.RefundOrderCancelled, same},
		"expired":                       {order.Order{Status: "expired"}, true, order.RefundOrderExpired, expired},
		"rejected":                      {order.Order{Status: "rejected"}, false, order.RefundOrderRejected, illegal},
		"reserved":                      {order.Order{Status: "reserved"}, false, order.RefundOrderExpired, illegal},
		"rejected, after the deadline":  {order.Order{Status: "rejected"}, true, order.RefundOrderRejected, illegal},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c.order.Version = 2
			check := func(what string, next order.Order, changed bool, err error, want any, reference string) {
				switch want := want.(type) {
				case error:
					require.ErrorIs(t, err, want, what)
					require.False(t, changed, what)
					require.Zero(t, next, what)
				case string:
					require.NoError(t, err, what)
					require.Equal(t, want != same, changed, what)
					if want == same {
						require.Equal(t, c.order, next, what)
						return
					}
					wanted := c.order
					wanted.Status, wanted.Version = order.Status(want), 3
					wanted.ExpiresAt, wanted.PaymentReference = time.Time{}, reference
					require.Equal(t, wanted, next, what)
				}
			}
			paid, due := c.order.DecidePayment(order.Money{Reference: "ref"}, c.overdue)
			require.Equal(t, c.pay, due)
			if due == "" {
				check("pay", paid, true, nil, "paid", "")
			} else {
				require.Zero(t, paid)
			}
			next, changed, err := c.order.Cancelled(c.overdue)
			check("cancel", next, changed, err, c.cancel, "")
		})
	}
}

// With a price the amount and the currency must be those of the order. What cannot be read is no amount.
func TestMoneyMustBeThePrice(t *testing.T) {
	t.Parallel()
	priced := order.Order{Status: "confirmed", Version: 2, ExpiresAt: time.Now(), Amount: 1290, Currency: "EUR"}
	free := order.Order{Status: "confirmed", Version: 2, ExpiresAt: time.Now()}
	for name, c := range map[string]struct {
		order order.Order
		money order.Money
		due   order.PaymentReason
	}{
		"the price":              {priced, order.Money{Amount: 1290, Currency: "EUR"}, ""},
		"too little":             {priced, order.Money{Amount: 1289, Currency: "EUR"}, order.RefundAmountMismatch},
		"too much":               {priced, order.Money{Amount: 1291, Currency: "EUR"}, order.RefundAmountMismatch},
		"another currency":       {priced, order.Money{Amount: 1290, Currency: "USD"}, order.RefundAmountMismatch},
		"no currency":            {priced, order.Money{Amount: 1290}, order.RefundAmountMismatch},
		"no amount":              {priced, order.Money{}, order.RefundAmountMismatch},
		"no price":               {free, order.Money{}, ""},
		"no price and an amount": {free, order.Money{Amount: 5, Currency: "USD"}, ""},
		"an unreadable amount":   {free, order.Money{Unreadable: `amount "-5"`}, order.RefundAmountMismatch},
	} {
		_, due := c.order.DecidePayment(c.money, false)
		require.Equal(t, c.due, due, name)
	}
	_, due := priced.DecidePayment(order.Money{Amount: 1}, true)
	require.Equal(t, order.RefundOrderExpired, due, "the first of two reasons")
}

// An operator cancels every order that is live, also when nothing further happens to it by itself.
func TestOperatorsCancelLiveOrders(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		order order.Order
		ended bool
	}{
		"awaits payment": {order.Order{Status: "confirmed", ExpiresAt: time.Now().Add(time.Hour)}, false},
		"overdue":        {order.Order{Status: "confirmed", ExpiresAt: time.Now().Add(-time.Hour)}, false},
		"final":          {order.Order{Status: "confirmed"}, true},
		"paid":           {order.Order{Status: "paid", PaymentReference: "pi_1"}, true},
	} {
		c.order.Version = 2
		require.Equal(t, c.ended, c.order.Ended(), name)
		next, changed, err := c.order.Withdrawn()
		require.NoError(t, err, name)
		require.True(t, changed, name)
		require.Equal(t, order.Order{Status: "cancelled", Version: 3, PaymentReference: c.order.PaymentReference}, next, name)
		require.True(t, next.Ended(), name)
		again, changed, err := next.Withdrawn()
		require.NoError(t, err, name)
		require.False(t, changed, name)
		require.Equal(t, next, again, name)
	}
	for _, status := range []order.Status{"reserved", "expired", "rejected", "voided"} {
		_, _, err := order.Order{Status: status}.Withdrawn()
		require.ErrorIs(t, err, order.ErrIllegalTransition, status)
	}
	require.False(t, order.Order{Status: "reserved"}.Ended())
}

func TestReasonsAreOneLineOfText(t *testing.T) {
	t.Parallel()
	for _, good := range []string{"a", "Käufer hat storniert: 🎫", strings.Repeat("ü", 500), " x "} {
		require.NoError(t, order.ValidateReason(good), good)
	}
	for _, bad := range []string{"", "  ", strings.Repeat("ü", 501), "a\nb", "\x00", "\x7f", "\u0085", "\xff"} {
		var invalid *order.InvalidError
		require.ErrorAs(t, order.ValidateReason(bad), &invalid, "%q", bad)
		require.Equal(t, "reason", invalid.Field)
	}
}

func TestOnlyUnpaidConfirmedOrderExpires(t *testing.T) {
	t.Parallel()
	next, err := order.Order{Status: "confirmed", Version: 2, ExpiresAt: time.Now()}.Expired()
	require.NoError(t, err)
	require.Equal(t, order.Order{Status: "expired", Version: 3}, next)
	for _, o := range []order.Order{
		{Status: "confirmed"}, {Status: "paid"}, {Status: "cancelled"}, {Status: "expired"}, {Status: "rejected"},
	} {
		_, err := o.Expired()
		require.ErrorIs(t, err, order.ErrIllegalTransition, o.Status)
	}
}

func TestTransitionErrorNamesStatusAndEvent(t *testing.T) {
	t.Parallel()
	err := order.Order{Status: "cancelled"}.Refusal(order.RefundOrderCancelled)
	var transition *order.TransitionError
	require.ErrorAs(t, err, &transition)
	require.Equal(t, order.TransitionError{Status: "cancelled", Event: "OrderPaid"}, *transition)
	require.EqualError(t, err, "the order's status does not allow this: no OrderPaid after cancelled")
}

func TestPaymentReferencesArePrintable(t *testing.T) {
	t.Parallel()
	for _, good := range []string{"a", "pi_3Nq 7/=~", " a ", strings.Repeat("x", 255)} {
		require.NoError(t, order.ValidateReference(good))
	}
	for _, bad := range []string{"", strings.Repeat("x", 256), "a\n", "\x00", "\x7f", "zahlung-ü", " ", "   "} {
		var invalid *order.InvalidError
		require.ErrorAs(t, order.ValidateReference(bad), &invalid, "%q", bad)
		require.Equal(t, "reference", invalid.Field)
	}
}

// A report with a reference is kept whatever else it says: no money is lost.
func TestReadMoneyKeepsWhatItCannotRead(t *testing.T) {
	t.Parallel()
	const id = "01a1fef0-cb72-76d5-818b-64550bc6ed90"
	for report, want := range map[string]order.Money{
		`{"reference":"p"}`: {},
		`{"reference":"p","order_id":"` + id + `","amount":4900,"currency":"EUR","livemode":true}`: {
			OrderID: uuid.MustParse(id), Amount: 4900, Currency: "EUR",
		},
		`{"reference":"p","order_id":null,"amount":null,"currency":null}`:     {},
		`{"reference":"p","order_id":"","amount":0,"currency":""}`:            {},
		`{"reference":"p","amount":1000000000000000}`:                         {Amount: 1_000_000_000_000_000},
		`{"reference":"p","amount":1000000000000001}`:                         {Unreadable: "amount 1000000000000001"},
		`{"reference":"p","amount":9223372036854775808}`:                      {Unreadable: "amount 9223372036854775808"},
		`{"reference":"p","amount":-5,"currency":"EUR"}`:                      {Currency: "EUR", Unreadable: "amount -5"},
		`{"reference":"p","amount":12.5}`:                                     {Unreadable: "amount 12.5"},
		`{"reference":"p","amount":4900.5e-1}`:                                {Unreadable: "amount 4900.5e-1"},
		`{"reference":"p","amount":"4900"}`:                                   {Unreadable: `amount "4900"`},
		`{"reference":"p","currency":"eur1"}`:                                 {Unreadable: `currency "eur1"`},
		`{"reference":"p","currency":"eur"}`:                                  {Currency: "EUR"},
		`{"reference":"p","currency":"ıSK"}`:                                  {Unreadable: `currency "ıSK"`},
		`{"reference":"p","order_id":17}`:                                     {Unreadable: "order_id 17"},
		`{"reference":"p","amount":NaN,"x":-Infinity,"y":[007,+1]}`:           {Unreadable: `amount "NaN"`},
		"\ufeff" + `{"reference":"p","amount":5}`:                             {Amount: 5},
		`{"reference":"q","amount":1,"amount":2,"reference":"p"}`:             {Amount: 2},
		`{"reference":"p","name":"\ud83d","\udfff":"` + "\xff\xf0\x9f" + `"}`: {},
		`{"reference":"p","name":"` + "a\nb\x00" + `\x","amount":5}`:          {Amount: 5},
		`{"reference":"p","order_id":"` + "\xff" + `"}`:                       {Unreadable: `order_id "` + "\ufffd" + `"`},
		`{"reference":"p","order_id":"` + strings.Repeat("ü", 400) + `"}`: {
			Unreadable: `order_id "` + strings.Repeat("ü", 245),
		},
		`{"reference":"p","x":` + strings.Repeat("[", 2000) + strings.Repeat("]", 2000) + `}`: {},

		`{"reference":"p","currency":978,"amount":[1]}`:      {Unreadable: `currency 978, amount [1]`},
		`{"reference":"p","order_id":"cart 7"}`:              {Unreadable: `order_id "cart 7"`},
		`{"reference":"p","order_id":"urn:uuid:` + id + `"}`: {Unreadable: `order_id "urn:uuid:` + id + `"`},
		`{"reference":"p","order_id":"` + strings.Repeat("x", 900) + `"}`: {
			Unreadable: `order_id "` + strings.Repeat("x", 490),
		},
	} {
		want.Reference = "p"
		m, err := order.ReadMoney([]byte(report))
		require.NoError(t, err, report)
		require.Equal(t, want, m, report)
	}
}

func TestReadMoneyRefusesWhatIsNoReport(t *testing.T) {
	t.Parallel()
	for report, says := range map[string]string{
		``:                        "the report must be one JSON object",
		`null`:                    "the report must be one JSON object",
		`"p"`:                     "the report must be one JSON object",
		`{"reference":"p"} {}`:    "the report must be one JSON object",
		`{}`:                      "reference must be 1 to 255 characters",
		`{"reference":7}`:         "reference must be a text in quotation marks",
		`{"reference":["p"]}`:     "reference must be a text in quotation marks",
		`{"reference":null}`:      "reference must be 1 to 255 characters",
		`{"reference":"p"`:        "the report must be one JSON object",
		`{"reference":"  "}`:      "reference must not consist of spaces",
		`{"reference":"a\u0000"}`: "reference must be printable ASCII",
		`{"reference":"` + strings.Repeat("p", 256) + `"}`: "reference must be 1 to 255 characters",
	} {
		_, err := order.ReadMoney([]byte(report))
		var invalid *order.InvalidError
		require.ErrorAs(t, err, &invalid, report)
		require.EqualError(t, err, says, report)
	}
}

// An integer is one for JSON Schema however it is spelled, and floats of clients are such spellings.
func TestReadMoneyReadsEverySpellingOfAnInteger(t *testing.T) {
	t.Parallel()
	const tooMuch = -1
	for number, want := range map[string]int64{
		"4900": 4900, "4900.0": 4900, "4900.000": 4900, "49e2": 4900, "49E2": 4900, "49E+2": 4900, "4.9e3": 4900,
		"0.0049e6": 4900, "490000e-2": 4900, "4900.0e0": 4900, "0": 0, "0.0": 0, "-0": 0, "-0.0e5": 0,
		"0e999999999999999999999": 0, "1e15": 1e15, "999999999999999.0": 999999999999999, "1000000000000000.0": 1e15,
		"9007199254740993e-1": tooMuch, "9007199254740993": tooMuch, "1e16": tooMuch, "1000000000000001.0": tooMuch,
		"4900.5": tooMuch, "4900.00000000000000000001": tooMuch, "0.1": tooMuch, "49e-3": tooMuch, "-4900.0": tooMuch,
		"1e999999999999999999999": tooMuch, "1e-999999999999999999999": tooMuch, "1e9223372036854775807": tooMuch,
		"100e9223372036854775807": tooMuch, "1.5e-9223372036854775808": tooMuch, "1e1000000000": tooMuch,
		"49" + strings.Repeat("0", 2000) + "e-1998": 4900, strings.Repeat("9", 2000): tooMuch,
	} {
		m, err := order.ReadMoney([]byte(`{"reference":"p","amount":` + number + `}`))
		require.NoError(t, err)
		if want == tooMuch {
			require.Zero(t, m.Amount, number)
			require.Equal(t, ("amount " + number)[:min(500, len(number)+7)], m.Unreadable)
		} else {
			require.Equal(t, order.Money{Reference: "p", Amount: want}, m, number)
		}
	}
}
