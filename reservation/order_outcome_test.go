package reservation_test

import (
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/reservation"
)

func TestOutcomesOnTheWire(t *testing.T) {
	t.Parallel()
	for text, outcomes := range map[string][]reservation.OrderOutcome{
		`{"orders":[]}`: {},
		`{"orders":[{"order_id":"01a1fd78-7a5f-757b-a405-0ce438e09a15","status":"confirmed","version":2},` +
			`{"order_id":"01a1fd78-7a47-79f0-861a-d13e99809a15","status":"paid","version":3}]}`: {
			{OrderID: uuid.MustParse("01a1fd78-7a5f-757b-a405-0ce438e09a15"), Status: reservation.StatusConfirmed, Version: 2},
			{OrderID: uuid.MustParse("01a1fd78-7a47-79f0-861a-d13e99809a15"), Status: reservation.StatusPaid, Version: 3},
		},
	} {
		require.Equal(t, text, string(reservation.AppendOutcomes(nil, outcomes)))
		got, err := reservation.DecodeOutcomes([]byte(text))
		require.NoError(t, err)
		require.Equal(t, outcomes, got)
	}
	for _, text := range []string{"", "{", `[]`, `{"orders":[{"order_id":"x"}]}`, `{"orders":{}}`} {
		_, err := reservation.DecodeOutcomes([]byte(text))
		require.ErrorIs(t, err, reservation.ErrUndecodable, text)
	}
}
