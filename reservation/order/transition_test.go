package order_test

import (
	"strings"
	"testing"
	"time"

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
	for name, c := range map[string]struct {
		order       order.Order
		overdue     bool
		pay, cancel any // a status, same, or the error
	}{
		"in time":                       {order.Order{Status: "confirmed", ExpiresAt: due}, false, "paid", "cancelled"},
		"overdue":                       {order.Order{Status: "confirmed", ExpiresAt: due}, true, expired, expired},
		"no payment window":             {order.Order{Status: "confirmed"}, false, illegal, illegal},
		"paid":                          {order.Order{Status: "paid", PaymentReference: "ref"}, false, same, illegal},
		"paid, after the deadline":      {order.Order{Status: "paid", PaymentReference: "ref"}, true, same, illegal},
		"paid with another reference":   {order.Order{Status: "paid", PaymentReference: "other"}, false, illegal, illegal},
		"cancelled":                     {order.Order{Status: "cancelled"}, false, illegal, same},
		"cancelled, after the deadline": {order.Order{Status: "cancelled"}, true, illegal, same},
		"expired":                       {order.Order{Status: "expired"}, true, expired, expired},
		"rejected":                      {order.Order{Status: "rejected"}, false, illegal, illegal},
		"reserved":                      {order.Order{Status: "reserved"}, false, illegal, illegal},
		"rejected, after the deadline":  {order.Order{Status: "rejected"}, true, illegal, illegal},
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
			next, changed, err := c.order.Paid("ref", c.overdue)
			check("pay", next, changed, err, c.pay, "ref")
			next, changed, err = c.order.Cancelled(c.overdue)
			check("cancel", next, changed, err, c.cancel, "")
		})
	}
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
	_, _, err := order.Order{Status: "cancelled"}.Paid("ref", false)
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
		_, _, err := order.Order{Status: "paid", PaymentReference: bad}.Paid(bad, false)
		require.ErrorAs(t, err, &invalid, "%q", bad)
	}
}
