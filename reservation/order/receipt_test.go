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
