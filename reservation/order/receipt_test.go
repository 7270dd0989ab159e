package order_test

import (
	"encoding/base64"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/reservation/order"
)

func newSigner(t testing.TB, secret string) *order.Signer {
	t.Helper()
	s, err := order.NewSigner([]byte(secret))
	require.NoError(t, err)
	return s
}

var (
	someSecret  = strings.Repeat("s", order.MinReceiptSecretBytes)
	someReceipt = order.Receipt{
		OrderID: uuid.MustParse("01a1fd78-7a5f-757b-a405-0ce438e09a15"),
		SaleID:  uuid.MustParse("01a1fd78-7a47-79f0-861a-d13e99809a15"),
		User:    "ada", Epoch: 3, Sequence: 129, Quantity: 2, ReservedAt: time.UnixMilli(1_795_000_000_123).UTC(),
	}
)

func TestReceiptRoundTrip(t *testing.T) {
	t.Parallel()
	s := newSigner(t, someSecret)
	for name, change := range map[string]func(*order.Receipt){
		"unchanged":    func(*order.Receipt) {},
		"longest user": func(r *order.Receipt) { r.User = strings.Repeat("u", order.MaxUserBytes) },
		"large numbers": func(r *order.Receipt) {
			r.Epoch, r.Sequence, r.Quantity, r.ReservedAt = 1<<62, 1<<62, 1<<62, time.UnixMilli(253_402_300_799_999).UTC()
		},
	} {
		r := someReceipt
		change(&r)
		text := string(s.Sign([]byte("before "), r))
		text, found := strings.CutPrefix(text, "before ")
		require.True(t, found, name)
		require.Equal(t, text, string(s.Sign(nil, r)), "the same reservation has one receipt")
		got, err := newSigner(t, someSecret).Verify(text)
		require.NoError(t, err, name)
		require.Equal(t, r, got, name)
	}
}

// Buyers keep receipts, so later versions have to read this wire format.
func TestReceiptWireFormat(t *testing.T) {
	t.Parallel()
	const text = "AQGh_Xh6X3V7pAUM5DjgmhUBof14ekd58IYa0T6ZgJoVA4EBAvu82fKeNGFkYT7uX3ffB3omz2KEigEYkIw"
	require.Equal(t, text, string(newSigner(t, someSecret).Sign(nil, someReceipt)))
}

// A receipt with any byte changed is invalid.
func TestVerifyRejectsTamperedReceipts(t *testing.T) {
	t.Parallel()
	s := newSigner(t, someSecret)
	text := s.Sign(nil, someReceipt)
	for i := range text {
		for c := range 256 {
			if byte(c) == text[i] {
				continue
			}
			tampered := append([]byte(nil), text...)
			tampered[i] = byte(c)
			_, err := s.Verify(string(tampered))
			require.ErrorIs(t, err, order.ErrReceiptInvalid, "byte %d made %q", i, c)
		}
	}
	raw, err := base64.RawURLEncoding.DecodeString(string(text))
	require.NoError(t, err)
	for i := range raw {
		for bit := range 8 {
			tampered := append([]byte(nil), raw...)
			tampered[i] ^= 1 << bit
			_, err := s.Verify(base64.RawURLEncoding.EncodeToString(tampered))
			require.ErrorIs(t, err, order.ErrReceiptInvalid, "bit %d of byte %d", bit, i)
		}
	}
	for n := range len(text) {
		_, err := s.Verify(string(text[:n]))
		require.ErrorIs(t, err, order.ErrReceiptInvalid, "cut off after %d", n)
	}
	for _, more := range []string{"=", "\n", "\r\n", "A", " ", "AAAA", strings.Repeat("A", 1<<20)} {
		for _, tampered := range []string{
			string(text) + more, more + string(text),
			string(text[:9]) + more + string(text[9:]),
		} {
			_, err := s.Verify(tampered)
			require.ErrorIs(t, err, order.ErrReceiptInvalid, "with %.9q", more)
		}
	}
}

func TestVerifyRejectsReceiptOfAnotherSecret(t *testing.T) {
	t.Parallel()
	text := string(newSigner(t, someSecret).Sign(nil, someReceipt))
	_, err := newSigner(t, strings.Repeat("t", order.MinReceiptSecretBytes)).Verify(text)
	require.ErrorIs(t, err, order.ErrReceiptInvalid)
	_, err = newSigner(t, someSecret+"s").Verify(text)
	require.ErrorIs(t, err, order.ErrReceiptInvalid)
	_, err = order.NewSigner([]byte(someSecret[1:]))
	require.ErrorContains(t, err, "at least 32")
}

func TestConcurrentSign(t *testing.T) {
	t.Parallel()
	s := newSigner(t, someSecret)
	var all sync.WaitGroup
	for n := range 8 {
		all.Go(func() {
			r := someReceipt
			for i := range 200 {
				r.Sequence = int64(n*1000 + i)
				got, err := s.Verify(string(s.Sign(nil, r)))
				assert.NoError(t, err)
				assert.Equal(t, r, got)
			}
		})
	}
	all.Wait()
}

// Signing is part of every accepted purchase, so it must not allocate. (The race detector drops every
// fourth object of a pool, which causes a few allocations; without the pool there would be eight.)
func TestSignAllocatesNothing(t *testing.T) {
	s := newSigner(t, someSecret)
	buf := make([]byte, 0, 512)
	s.Sign(buf, someReceipt)
	require.Less(t, testing.AllocsPerRun(1000, func() { s.Sign(buf, someReceipt) }), 4.0)
}

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

// Anyone can make up a receipt that is read without the secret.
func TestParseReceiptReadsAnyText(t *testing.T) {
	t.Parallel()
	s := newSigner(t, someSecret)
	r := someReceipt
	r.Lines = "a1c1"
	text := string(s.Sign(nil, r))
	got, err := order.ParseReceipt(text)
	require.NoError(t, err)
	require.Equal(t, r, got)
	got, err = order.ParseReceipt(string(newSigner(t, strings.Repeat("t", order.MinReceiptSecretBytes)).Sign(nil, r)))
	require.NoError(t, err)
	require.Equal(t, r.AppendBody(nil), got.AppendBody(nil), "the body does not change with the secret")
	for _, wrong := range []string{"", "A", "%", text + "=", text + "\n", text[:40], strings.Repeat("A", 1<<20)} {
		_, err := order.ParseReceipt(wrong)
		require.ErrorIs(t, err, order.ErrReceiptInvalid, "%.40q", wrong)
	}
	rapid.Check(t, func(r *rapid.T) {
		raw := rapid.SliceOfN(rapid.Byte(), 0, 120).Draw(r, "raw")
		raw = append([]byte{byte(rapid.IntRange(0, 3).Draw(r, "version"))}, raw...)
		_, _ = order.ParseReceipt(base64.RawURLEncoding.EncodeToString(raw))
	})
	// The length of the lines is above the greatest number.
	raw := append([]byte{2}, make([]byte, 32+4)...)
	raw = append(raw, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01)
	_, err = order.ParseReceipt(base64.RawURLEncoding.EncodeToString(append(raw, make([]byte, 16)...)))
	require.ErrorIs(t, err, order.ErrReceiptInvalid)
}

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

func TestLinesHaveOneForm(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"a1", "a2c1", "z1A1", "Z1000000", "a999999b1"} {
		lines, err := order.ParseLines(text)
		require.NoError(t, err, text)
		units := make([]int64, order.MaxItems)
		for item, n := range lines.Each() {
			units[item] = n
		}
		require.Equal(t, order.Lines(text), order.MakeLines(units))
	}
	for _, text := range []string{
		"", "1", "a", "a0", "a01", "a-1", "a+1", "a 1", "a1 ", "aa1", "a1a1", "b1a1", "A1z1", "a1000001", "a999999b2",
		"a1b", "ä1", "a1.5", "a99999999999999999999", " a1", "a1\n", "_1",
	} {
		_, err := order.ParseLines(text)
		require.Error(t, err, "%q", text)
	}
	lines, err := order.ParseLines("a2c1")
	require.NoError(t, err)
	require.EqualValues(t, 3, lines.Units())
	require.EqualValues(t, `{"m":2,"xl":1}`, lines.Named([]string{"m", "l", "xl"}))
	require.EqualValues(t, `{"m":2,"c":1}`, lines.Named([]string{"m"}))
	require.Empty(t, order.Lines("").Named(nil))
}

// The longest lines fit into a receipt.
func TestLongestLinesFitIntoReceipt(t *testing.T) {
	t.Parallel()
	units := make([]int64, order.MaxItems)
	left := int64(order.MaxPerOrder)
	for item := range units {
		units[item] = 10_000
		left -= 10_000
	}
	for item := 0; left >= 90_000; item++ {
		units[item] += 90_000
		left -= 90_000
	}
	lines := order.MakeLines(units)
	parsed, err := order.ParseLines(string(lines))
	require.NoError(t, err)
	signer, err := order.NewSigner([]byte(strings.Repeat("s", order.MinReceiptSecretBytes)))
	require.NoError(t, err)
	receipt := order.Receipt{
		User: strings.Repeat("u", order.MaxUserBytes), Quantity: parsed.Units(), Lines: parsed, Epoch: 1 << 31,
		Sequence: 1 << 40,
	}
	text := signer.Sign(nil, receipt)
	read, err := signer.Verify(string(text))
	require.NoError(t, err)
	require.Equal(t, parsed, read.Lines)
	require.Equal(t, receipt.User, read.User)
}

func TestItemCodes(t *testing.T) {
	t.Parallel()
	for _, code := range []string{"m", "size-42.5_wide", strings.Repeat("x", 32)} {
		require.True(t, order.IsItemCode(code), code)
	}
	for _, code := range []string{"", "M", "a b", strings.Repeat("x", 33), "ä", `"`, "a\n"} {
		require.False(t, order.IsItemCode(code), "%q", code)
	}
}
