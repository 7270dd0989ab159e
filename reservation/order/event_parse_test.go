package order

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
)

func ownPayload() []byte {
	return AppendReservedPayload(nil, OrderReserved{
		OrderID: uuid.MustParse("0198c0de-0000-7000-8abc-def012345678"),
		SaleID:  uuid.MustParse("0198c0de-ffff-7000-8000-000000000001"),
		UserID:  "auth0|5f7c8e", Quantity: 3, Epoch: 2, RequestedAt: time.UnixMilli(1_763_712_000_123),
	})
}

func TestPlainPayloadIsParsedWithoutDecoder(t *testing.T) {
	t.Parallel()
	p, ok := parseReservedPayload(ownPayload())
	require.True(t, ok)
	var want reservedPayload
	require.NoError(t, json.Unmarshal(ownPayload(), &want))
	require.Equal(t, want, p)
}

// FuzzParseReservedPayload compares the parser with encoding/json on all payloads that it accepts.
//
//	go test -run '^$' -fuzz ParseReservedPayload -fuzztime 30s ./reservation/order
func FuzzParseReservedPayload(f *testing.F) {
	own := string(ownPayload())
	f.Add(own)
	for old, odd := range map[string]string{
		"auth0|": `\u0041`, "5f7c8e": "\xff", "8e\"": "8e\x00\"", `:3,`: ":03,", ":2,": ":-2,", "}": "} ",
		"12345678": "1234567", "0198c0de-0": "0198c0de00",
		"1763712000123": "9223372036854775808", "abc": "ABC", `"epoch"`: `"Epoch"`,
	} {
		f.Add(strings.Replace(own, old, odd, 1))
	}
	f.Add(own[:len(own)-1])
	f.Add(own + own)
	f.Fuzz(func(t *testing.T, payload string) {
		p, ok := parseReservedPayload([]byte(payload))
		if !ok {
			return
		}
		var want reservedPayload
		require.NoError(t, json.Unmarshal([]byte(payload), &want))
		require.Equal(t, want, p)
	})
}
