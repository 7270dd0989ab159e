package order_test

import (
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/reservation/order"
)

// A report with a reference is kept whatever else it says: no money is lost.
func TestReadMoneyKeepsWhatItCannotRead(t *testing.T) {
	t.Parallel()
	const id = "01a1fef0-cb72-76d5-818b-64550bc6ed90"
	for report, want := range map[string]order.Money{
		`{"reference":"p"}`: {},
		`{"reference":"p","order_id":"` + id + `","amount":4900,"currency":"EUR","livemode":true}`: {
			OrderID: uuid.MustParse(id), Amount: 4900, Currency: "EUR",
		},
		`{"reference":"p","order_id":null,"amount":null,"currency":null}`: {},
		`{"reference":"p","order_id":"","amount":0,"currency":""}`:        {},
		`{"reference":"p","amount":1000000000000000}`:                     {Amount: 1_000_000_000_000_000},
		`{"reference":"p","amount":1000000000000001}`:                     {Unreadable: "amount 1000000000000001"},
		`{"reference":"p","amount":9223372036854775808}`:                  {Unreadable: "amount 9223372036854775808"},
		`{"reference":"p","amount":-5,"currency":"EUR"}`:                  {Currency: "EUR", Unreadable: "amount -5"},
		`{"reference":"p","amount":12.5}`:                                 {Unreadable: "amount 12.5"},
		`{"reference":"p","amount":1e3}`:                                  {Unreadable: "amount 1e3"},
		`{"reference":"p","amount":"4900"}`:                               {Unreadable: `amount "4900"`},
		`{"reference":"p","currency":"eur1"}`:                             {Unreadable: `currency "eur1"`},
		`{"reference":"p","currency":978,"amount":[1]}`:                   {Unreadable: `currency 978, amount [1]`},
		`{"reference":"p","order_id":"cart 7"}`:                           {Unreadable: `order_id "cart 7"`},
		`{"reference":"p","order_id":"urn:uuid:` + id + `"}`:              {Unreadable: `order_id "urn:uuid:` + id + `"`},
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
		`{"reference":7}`:         "reference must be 1 to 255 characters",
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
