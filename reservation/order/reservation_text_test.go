package order_test

import (
	"encoding/base64"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/reservation/order"
)

func TestCompactIDHasOneFormForEachOrder(t *testing.T) {
	t.Parallel()
	id := uuid.MustParse("01a1fd78-7a5f-757b-a405-0ce438e09a15")
	const text = "AaH9eHpfdXukBQzkOOCaFQ"
	require.Equal(t, text, order.CompactID(id))
	rapid.Check(t, func(r *rapid.T) {
		id := uuid.UUID(rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(r, "id"))
		got, err := order.ParseCompactID(order.CompactID(id))
		require.NoError(r, err)
		require.Equal(r, id, got)
	})
	for _, other := range []string{
		"", text[:21], text + "A", id.String(), strings.Repeat("=", 22), text[:20] + "==", text[:21] + "+",
		"AaH9eHpfdXukBQzkOOCaFR",         // the same bytes to a decoder that ignores the last four bits
		text[:10] + "\n\n" + text[10:20], // one byte too few for a decoder that skips line breaks
	} {
		_, err := order.ParseCompactID(other)
		require.Error(t, err, "%q", other)
	}
}

func TestParseReservation(t *testing.T) {
	t.Parallel()
	const id = "AaH9eHpfdXukBQzkOOCaFQ"
	const key = "abcdefghijklmnopqrstuQ"
	want := order.Reservation{
		OrderID: uuid.MustParse("01a1fd78-7a5f-757b-a405-0ce438e09a15"), Quantity: 3, Sequence: 17,
		ReservedAt: time.UnixMilli(0x1a0c2d3e4f5).UTC(),
	}
	for text, epoch := range map[string]int64{
		id + " 3 17 1a0c2d3e4f5": 0, id + " 3 17 1a0c2d3e4f5@2": 2,
		id + " 3 17 1a0c2d3e4f5:" + key: 0, id + " 3 17 1a0c2d3e4f5:" + key + "@12": 12,
	} {
		want.Epoch = epoch
		got, itsKey, err := order.ParseReservation(text)
		require.NoError(t, err)
		require.Equal(t, want, got)
		require.Equal(t, strings.Contains(text, key), itsKey == key)
	}
	for _, text := range []string{
		"", "rubbish", id, id + " 3 17", id + " 3 17 ", id + " 3 17 1a0c2d3e4f5 ", " " + id + " 3 17 1a0c2d3e4f5",
		id + "  3 17 1a0c2d3e4f5",
		id[1:] + " 3 17 1a0c2d3e4f5", id + " -3 17 1a0c2d3e4f5", id + " +3 17 1a0c2d3e4f5", id + " 3 1f 1a0c2d3e4f5",
		id + " 3 17 0x1a0c2d3e4f5",
		id + " 3 17 -1", id + " 3 17 8000000000000000", id + " 9223372036854775808 17 1", id + " 3 17 1a0c2d3e4f5g",
		id + " 3 17 1a0c2d3e4f5:", id + " 3 17 1a0c2d3e4f5@", id + " 3 17 1a0c2d3e4f5:" + key[1:],
		id + " 3 17 1a0c2d3e4f5:" + key + "@",
		id + " 3 17 1a0c2d3e4f5@1:" + key, id + " 3 17 1a0c2d3e4f5@1@2", id + " 3 17 1a0c2d3e4f5@-1",
		id + " 3 17 1a0c2d3e4f5@x",
		id + " 3 17 1a0c2d3e4f5 - 1", "01a1fd78-7a5f-757b-a405-0ce438e09a15 3 17 1790000000000 -",
		"01a1fd78-7a5f-757b-a405-0ce438e09a15 3 17 1790000000000 " + key + " 1",
	} {
		_, _, err := order.ParseReservation(text)
		require.Error(t, err, "%q", text)
	}
}

// A rebuild writes the same reservation as the script, and the scripts and ParseReservation read it.
func TestScriptAndRebuildWriteSameReservation(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Sale(t, 1<<20)
	key := base64.RawURLEncoding.EncodeToString(make([]byte, 16))
	rapid.Check(t, func(r *rapid.T) {
		numbers := rapid.Int64Range(1, 1<<40)
		holder := reservation.Holder{
			User: "ann", KeyFingerprint: rapid.SampledFrom([]string{"", key}).Draw(r, "key"),
			Epoch: rapid.Int64Range(1, 9).Draw(r, "epoch"),
			Reservation: order.Reservation{
				OrderID: order.NewOrderID(sale.ID), Quantity: rapid.Int64Range(1, order.MaxPerOrder).Draw(r, "quantity"),
				Sequence: numbers.Draw(r, "sequence"), ReservedAt: time.UnixMilli(numbers.Draw(r, "time")).UTC(),
			},
		}
		require.NoError(r, s.StageBuyers(t.Context(), 0, sale.ID, testshop.Token, 9, []reservation.Holder{holder}))
		text := s.Rdb.HGet(t.Context(), s.Keys.Staged(0, sale.ID, testshop.Token), "ann").Val()
		want := holder.Reservation
		if holder.Epoch != 9 {
			want.Epoch = holder.Epoch
		}
		got, itsKey, err := order.ParseReservation(text)
		require.NoError(r, err, text)
		require.Equal(r, want, got, text)
		require.Equal(r, holder.KeyFingerprint, itsKey, text)

		require.NoError(r, s.Rdb.HSet(t.Context(), s.Keys.Buyers(0, sale.ID), "ann", text).Err())
		want.Epoch = holder.Epoch
		if holder.Epoch == 9 {
			want.Epoch = 1 // the sale's
		}
		bought := reservation.Answer{Verdict: reservation.AlreadyPurchased, Reservation: want}
		require.Equal(r, bought, s.Ask(t, sale.ID, "ann"))
	})

	for _, request := range []reservation.Request{
		{Sale: sale.ID, User: "bob", Quantity: 1}, {Sale: sale.ID, User: "cid", Quantity: 1, IdempotencyKey: "click-1"},
	} {
		answer, err := s.Reserve(t.Context(), request)
		require.NoError(t, err)
		held := s.Rdb.HGet(t.Context(), s.Keys.Buyers(0, sale.ID), request.User).Val()
		_, fingerprint, _ := strings.Cut(held, ":")
		require.Equal(t, request.IdempotencyKey != "", fingerprint != "")
		holder := reservation.Holder{
			User: request.User, Reservation: answer.Reservation, KeyFingerprint: fingerprint, Epoch: answer.Reservation.Epoch,
		}
		require.NoError(t, s.StageBuyers(t.Context(), 0, sale.ID, testshop.Token, 1, []reservation.Holder{holder}))
		require.Equal(t, held, s.Rdb.HGet(t.Context(), s.Keys.Staged(0, sale.ID, testshop.Token), request.User).Val())
	}
}

// With one character more, Redis takes 16 bytes more for each order.
func TestReservationOfOneUnitFitsInto44Characters(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Sale(t, 20_000_000)
	for _, sequence := range []int64{0, 999_999, 9_999_998} {
		require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Sale(0, sale.ID), "sequence", sequence).Err())
		user := uuid.NewString()
		require.Equal(t, sequence+1, s.Ask(t, sale.ID, user).Reservation.Sequence)
		held := s.Rdb.HGet(t.Context(), s.Keys.Buyers(0, sale.ID), user).Val()
		require.LessOrEqual(t, len(held), 44, held)
	}
}
