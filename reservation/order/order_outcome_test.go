package order_test

import (
	"encoding/base64"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"stampede/reservation/order"
)

func TestOutcomeWireFormat(t *testing.T) {
	t.Parallel()
	ids := make([]uuid.UUID, 4)
	for i := range ids {
		ids[i] = uuid.New()
	}
	together := func(ids ...uuid.UUID) string {
		var raw []byte
		for _, id := range ids {
			raw = append(raw, id[:]...)
		}
		return base64.StdEncoding.EncodeToString(raw)
	}
	outcome := func(id uuid.UUID, status order.Status, version int) order.OrderOutcome {
		return order.OrderOutcome{OrderID: id, Status: status, Version: version}
	}
	for text, outcomes := range map[string][]order.OrderOutcome{
		`{"orders":[]}`: {},
		`{"orders":[{"status":"confirmed","version":2,"ids":"` + together(ids[0], ids[1]) + `"},` +
			`{"status":"paid","version":3,"ids":"` + together(ids[2]) + `"},` +
			`{"status":"paid","version":4,"ids":"` + together(ids[3]) + `"}]}`: {
			outcome(ids[0], order.StatusConfirmed, 2), outcome(ids[1], order.StatusConfirmed, 2),
			outcome(ids[2], order.StatusPaid, 3), outcome(ids[3], order.StatusPaid, 4),
		},
	} {
		require.Equal(t, text, string(order.AppendOutcomes(nil, outcomes)))
		got, err := order.DecodeOutcomes([]byte(text))
		require.NoError(t, err)
		require.Equal(t, outcomes, got)
	}
	id := together(ids[0])
	for _, text := range []string{
		"", "{", `[]`, `{"orders":{}}`, `{"orders":[{}]}`,
		`{"orders":[{"order_id":"` + ids[0].String() + `","status":"confirmed","version":2}]}`,
		`{"orders":[{"status":"confirmed","version":2,"ids":""}]}`,
		`{"orders":[{"status":"confirmed","version":2,"ids":"AAAA"}]}`,
		`{"orders":[{"status":"confirmed","version":2,"ids":"` + id[:len(id)-1] + `"}]}`,
		`{"orders":[{"status":"confirmed","version":2,"ids":"` + id[1:] + `A"}]}`,
		`{"orders":[{"status":"confirmed","version":0,"ids":"` + id + `"}]}`, `{"orders":[{"version":2,"ids":"` + id + `"}]}`,
		`{"orders":[{"status":"confirmed","version":"2","ids":"` + id + `"}]}`,
		`{"orders":[{"status":"confirmed","version":2,"ids":["` + id + `"]}]}`,
	} {
		_, err := order.DecodeOutcomes([]byte(text))
		require.ErrorIs(t, err, order.ErrUndecodable, text)
	}
}

func TestOutcomesRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(r *rapid.T) {
		outcomes := rapid.SliceOf(rapid.Custom(func(r *rapid.T) order.OrderOutcome {
			return order.OrderOutcome{
				OrderID: uuid.UUID(rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(r, "id")),
				Status: rapid.SampledFrom(
					[]order.Status{order.StatusConfirmed, order.StatusRejected, order.StatusPaid},
				).Draw(r, "status"),
				Version: rapid.IntRange(1, 3).Draw(r, "version"),
			}
		})).Draw(r, "outcomes")
		got, err := order.DecodeOutcomes(order.AppendOutcomes(nil, outcomes))
		require.NoError(r, err)
		require.ElementsMatch(r, outcomes, got)
	})
}

// The outcome of every order is published, so its size counts like the size of an order.
func TestOutcomeTakes22Bytes(t *testing.T) {
	t.Parallel()
	outcomes := make([]order.OrderOutcome, 500)
	for i := range outcomes {
		outcomes[i] = order.OrderOutcome{OrderID: uuid.New(), Status: order.StatusConfirmed, Version: 2}
	}
	outcomes[250].Status = order.StatusRejected // does not split the group around it
	payload := order.AppendOutcomes(nil, outcomes)
	require.LessOrEqual(t, len(payload), 22*len(outcomes))
	require.Equal(t, 2, strings.Count(string(payload), `"ids"`))
}
