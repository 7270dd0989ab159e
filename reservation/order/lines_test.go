package order_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/reservation/order"
)

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
