package ingress

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/reservation/order"
)

// FuzzUnits compares the fast parsers with the strict decoder. A leading space keeps a body from the fast parsers;
// the decoder skips it.
func FuzzUnits(f *testing.F) {
	for _, body := range []string{
		`{"quantity":1}`, `{"quantity": 2}`, `{"quantity":1000001}`, `{"quantity":9007199254740993}`,
		`{"quantity":99999999999999999999999}`,
		`{"quantity":0}`, `{"quantity":01}`, `{"quantity":-1}`, `{"quantity":1.5}`, `{"quantity":1e2}`, `{"quantity":"3"}`,
		`{"quantity":null}`,
		`{"quantity":}`, `{"quantity": }`, `{"quantity":1}}`, `{"quantity":1 }`, `{"quantity":  1}`, `{"quantity":1`,
		`{"quantity":`, `{}`, ` `, `null`,
		`{"items":{"m":1}}`, `{"items":{"m":1,"l":2}}`, `{"items":{"size-42.5":9007199254740993}}`, `{"items":{"m":1} }`,
		`{"items":{}}`, `{"items":{"m":0}}`, `{"items":{"m":-1}}`, `{"items":{"m":1.5}}`, `{"items":{"m":1,"m":1}}`,
		`{"items":{"M":1}}`, `{"items":{"a b":1}}`, `{"items":{"":1}}`, `{"items":{"m":"1"}}`, `{"items":{"m":1}`,
		`{"items":{"m":1,}}`, `{"items":{"m":1}}}`, `{"items":{"m":1},"quantity":1}`, `{"quantity":1,"items":{"m":1}}`,
		`{"items":null}`, `{"items":[]}`, `{"items":{"m":1},"items":{"l":1}}`, `{"items":{"\u006d":1}}`, `{"items":{"m":{}}}`,
		`{"items":{` + strings.Repeat(`"m":1,`, order.MaxItems) + `"l":1}}`, `{"items":{` + itemsOf(order.MaxItems) + `}}`,
		`{"items":{` + itemsOf(order.MaxItems+1) + `}}`,
		`{"quantity":1,"quantity":1}`, `{"Quantity":1}`, "{\"quantity\":1\x00}", "{\"quantity\":\xff}",
	} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		if len(body) == 0 {
			return
		}
		fast, items, errFast := parseUnits(body)
		decoded, decodedItems, errDecoded := parseUnits(append([]byte{' '}, body...))
		require.Equal(t, errDecoded == nil, errFast == nil, "fast: %v, decoded: %v", errFast, errDecoded)
		require.Equal(t, decoded, fast)
		require.Equal(t, decodedItems, items)
		all := append(slices.Collect(maps.Values(items)), fast)
		if items != nil {
			require.Zero(t, fast)
			require.LessOrEqual(t, len(items), order.MaxItems)
			all = all[:len(items)]
			require.NotEmpty(t, all)
		}
		for _, units := range all {
			if errFast == nil {
				require.Positive(t, units)
				require.LessOrEqual(t, units, int64(order.MaxPerOrder+1))
			}
		}
	})
}

// itemsOf returns the members of so many items.
func itemsOf(n int) string {
	members := make([]string, n)
	for i := range members {
		members[i] = fmt.Sprintf(`"item-%d":1`, i)
	}
	return strings.Join(members, ",")
}

func TestUnitsOfItems(t *testing.T) {
	t.Parallel()
	for body, want := range map[string]map[string]int64{
		`{"items":{"m":1,"l":2}}`:       {"m": 1, "l": 2},
		`{"items": {"m": 1 , "l": 2} }`: {"m": 1, "l": 2},
		`{"items":{"M":1}}`:             {"M": 1}, // no sale has it
	} {
		quantity, items, err := parseUnits([]byte(body))
		require.NoError(t, err, body)
		require.Zero(t, quantity)
		require.Equal(t, want, items)
	}
	for _, body := range []string{
		`{"items":{}}`, `{"items":null}`, `{"items":[]}`, `{"items":{"m":0}}`, `{"items":{"m":-1}}`, `{"items":{"m":1.5}}`,
		`{"items":{"m":null}}`, `{"items":{"":1}}`, `{"items":{"m":1e1}}`, `{"items":{"m":1,"m":1}}`,
		`{"items":{"m":1},"quantity":1}`,
		`{"items":{` + itemsOf(order.MaxItems+1) + `}}`,
	} {
		_, _, err := parseUnits([]byte(body))
		require.Error(t, err, body)
	}
}
