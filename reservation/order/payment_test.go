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
