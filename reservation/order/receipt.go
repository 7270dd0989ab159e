package order

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"sync"
	"time"

	"github.com/google/uuid"
)

// MinReceiptSecretBytes is the minimum length of the secret for receipts: the length of an SHA-256.
const MinReceiptSecretBytes = sha256.Size

// ErrReceiptInvalid is returned for a text that is no receipt, was changed, or was signed with another secret.
var ErrReceiptInvalid = errors.New("the receipt is not valid")

// Receipt proves an accepted order even if Redis was lost before Postgres had the order. It holds
// Redis's decision and the epoch of the sale's stock.
type Receipt struct {
	OrderID    uuid.UUID
	SaleID     uuid.UUID
	User       string
	Epoch      int64
	Sequence   int64
	Quantity   int64
	Lines      Lines
	ReservedAt time.Time // to the millisecond
}

// A receipt is, in base64url without padding: receiptVersion, the order, the sale, epoch, sequence, quantity and the
// time in milliseconds as uvarints, the user, and the first receiptTag bytes of the HMAC-SHA256 of all of that.
// With lines it is receiptItemsVersion, and the length of the lines and the lines come before the user.
// All ingresses sign the same receipt for a reservation.
const (
	receiptVersion      = 1
	receiptItemsVersion = 2
	receiptTag          = 16
	receiptBytes        = 1 + 2*len(uuid.UUID{}) + 5*binary.MaxVarintLen64 + linesMax + MaxUserBytes + receiptTag
)

// Signer signs receipts and verifies them. It is safe for concurrent use.
type Signer struct {
	pool sync.Pool // of *signing
}

// signing is the state of one signature. Resetting an HMAC is cheaper than keying another one.
type signing struct {
	mac hash.Hash
	raw [receiptBytes]byte
	tag [sha256.Size]byte
}

// NewSigner makes a signer. All ingresses need the same secret, of at least MinReceiptSecretBytes.
func NewSigner(secret []byte) (*Signer, error) {
	if len(secret) < MinReceiptSecretBytes {
		return nil, fmt.Errorf("the secret for receipts has %d bytes, want at least %d", len(secret), MinReceiptSecretBytes)
	}
	secret = append([]byte(nil), secret...)
	return &Signer{pool: sync.Pool{New: func() any { return &signing{mac: hmac.New(sha256.New, secret)} }}}, nil
}

// Fingerprint tells the secret from others. Like a receipt, it does not reveal it.
func (s *Signer) Fingerprint() string {
	work := s.pool.Get().(*signing)
	defer s.pool.Put(work)
	return hex.EncodeToString(work.sum([]byte("fingerprint"))[:4])
}

// Sign appends the receipt to dst: letters, digits, - and _. The user must pass ValidateUser, and
// no number may be negative.
func (s *Signer) Sign(dst []byte, r Receipt) []byte {
	work := s.pool.Get().(*signing)
	defer s.pool.Put(work)
	raw := r.AppendBody(work.raw[:0])
	raw = append(raw, work.sum(raw)...)
	return base64.RawURLEncoding.AppendEncode(dst, raw)
}

// AppendBody appends what a signature of the receipt covers: the receipt, decoded, without its signature. It does not
// change with the secret. The user and the numbers must be those that Sign takes.
func (r Receipt) AppendBody(dst []byte) []byte {
	version := byte(receiptVersion)
	if r.Lines != "" {
		version = receiptItemsVersion
	}
	dst = append(dst, version)
	dst = append(dst, r.OrderID[:]...)
	dst = append(dst, r.SaleID[:]...)
	dst = binary.AppendUvarint(dst, uint64(r.Epoch))
	dst = binary.AppendUvarint(dst, uint64(r.Sequence))
	dst = binary.AppendUvarint(dst, uint64(r.Quantity))
	dst = binary.AppendUvarint(dst, uint64(r.ReservedAt.UnixMilli()))
	if r.Lines != "" {
		dst = append(binary.AppendUvarint(dst, uint64(len(r.Lines))), r.Lines...)
	}
	return append(dst, r.User...)
}

// sum is the tag of the signed bytes, valid until the next call.
func (w *signing) sum(signed []byte) []byte {
	w.mac.Reset()
	_, _ = w.mac.Write(signed) // never fails
	return w.mac.Sum(w.tag[:0])[:receiptTag]
}

// Verify reads a receipt that Sign wrote with the same secret. The error is ErrReceiptInvalid.
func (s *Signer) Verify(text string) (Receipt, error) {
	signed, tag, err := splitReceipt(text)
	if err != nil {
		return Receipt{}, err
	}
	work := s.pool.Get().(*signing)
	genuine := hmac.Equal(tag, work.sum(signed))
	s.pool.Put(work)
	if !genuine {
		return Receipt{}, ErrReceiptInvalid
	}
	return parseReceipt(signed)
}

// ParseReceipt reads a receipt without the secret, so anyone can have made it up. The error is ErrReceiptInvalid.
func ParseReceipt(text string) (Receipt, error) {
	signed, _, err := splitReceipt(text)
	if err != nil {
		return Receipt{}, err
	}
	return parseReceipt(signed)
}

func splitReceipt(text string) (signed, tag []byte, err error) {
	if len(text) > base64.RawURLEncoding.EncodedLen(receiptBytes) {
		return nil, nil, ErrReceiptInvalid
	}
	raw, err := base64.RawURLEncoding.DecodeString(text)
	// Compare with the canonical encoding: the decoder ignores line ends and trailing bits.
	if err != nil || len(raw) <= receiptTag || base64.RawURLEncoding.EncodeToString(raw) != text {
		return nil, nil, ErrReceiptInvalid
	}
	return raw[:len(raw)-receiptTag], raw[len(raw)-receiptTag:], nil
}

// parseReceipt reads what a signature covers. With a valid signature it fails only for another version.
func parseReceipt(signed []byte) (Receipt, error) {
	var r Receipt
	if len(signed) < 1+len(r.OrderID)+len(r.SaleID) || signed[0] != receiptVersion && signed[0] != receiptItemsVersion {
		return Receipt{}, ErrReceiptInvalid
	}
	rest := signed[1:]
	rest = rest[copy(r.OrderID[:], rest):]
	rest = rest[copy(r.SaleID[:], rest):]
	var millis, chars int64
	numbers := []*int64{&r.Epoch, &r.Sequence, &r.Quantity, &millis, &chars}
	if signed[0] == receiptVersion {
		numbers = numbers[:4]
	}
	for _, number := range numbers {
		n, length := binary.Uvarint(rest)
		if length <= 0 {
			return Receipt{}, ErrReceiptInvalid
		}
		*number, rest = int64(n), rest[length:]
	}
	if chars < 0 || chars > int64(len(rest)) {
		return Receipt{}, ErrReceiptInvalid
	}
	r.Lines, rest = Lines(rest[:chars]), rest[chars:]
	r.ReservedAt, r.User = time.UnixMilli(millis).UTC(), string(rest)
	return r, nil
}

// Order returns the receipt's order with this status: reserved, or voided because the stock was
// rebuilt without it.
func (r Receipt) Order(status Status) Order {
	o := Order{
		ID: r.OrderID, SaleID: r.SaleID, UserID: r.User, Quantity: r.Quantity, Lines: r.Lines,
		Status: StatusReserved, Version: 1, ReservedAt: r.ReservedAt,
	}
	if status == StatusVoided {
		o.Status, o.Version, o.Reason = StatusVoided, 2, VoidedSaleRebuilt
	}
	return o
}
