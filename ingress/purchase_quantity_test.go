package ingress

import (
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/reservation/order"
)

// FuzzQuantity compares the fast parser with the strict decoder. A leading space keeps a body from the fast parser;
// the decoder skips it.
func FuzzQuantity(f *testing.F) {
	for _, body := range []string{
		`{"quantity":1}`, `{"quantity": 2}`, `{"quantity":1000001}`, `{"quantity":9007199254740993}`,
		`{"quantity":99999999999999999999999}`,
		`{"quantity":0}`, `{"quantity":01}`, `{"quantity":-1}`, `{"quantity":1.5}`, `{"quantity":1e2}`, `{"quantity":"3"}`,
		`{"quantity":null}`,
		`{"quantity":}`, `{"quantity": }`, `{"quantity":1}}`, `{"quantity":1 }`, `{"quantity":  1}`, `{"quantity":1`,
		`{"quantity":`, `{}`, ` `, `null`,
		`{"quantity":1,"quantity":1}`, `{"Quantity":1}`, "{\"quantity\":1\x00}", "{\"quantity\":\xff}",
	} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		if len(body) == 0 {
			return
		}
		fast, errFast := parseQuantity(body)
		decoded, errDecoded := parseQuantity(append([]byte{' '}, body...))
		require.Equal(t, errDecoded == nil, errFast == nil, "fast: %v, decoded: %v", errFast, errDecoded)
		require.Equal(t, decoded, fast)
		if errFast == nil {
			require.Positive(t, fast)
			require.LessOrEqual(t, fast, int64(order.MaxPerOrder+1))
		}
	})
}
