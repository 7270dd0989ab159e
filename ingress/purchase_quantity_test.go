package ingress

import (
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/reservation/order"
)

// FuzzQuantity compares the parser by hand with the strict decoder. A leading space keeps a body from the parser by
// hand; the decoder skips it.
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
		byHand, errByHand := parseQuantity(body)
		decoded, errDecoded := parseQuantity(append([]byte{' '}, body...))
		require.Equal(t, errDecoded == nil, errByHand == nil, "by hand: %v, decoded: %v", errByHand, errDecoded)
		require.Equal(t, decoded, byHand)
		if errByHand == nil {
			require.Positive(t, byHand)
			require.LessOrEqual(t, byHand, int64(order.MaxPerOrder+1))
		}
	})
}
