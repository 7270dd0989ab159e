package figure_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/internal/figure"
)

func TestCountSeparatesThousands(t *testing.T) {
	t.Parallel()
	for n, want := range map[int64]string{
		0: "0", 7: "7", 999: "999", 1000: "1,000", 123456: "123,456", 1234567: "1,234,567",
		-1: "-1", -999: "-999", -1000: "-1,000", math.MinInt64: "-9,223,372,036,854,775,808",
	} {
		require.Equal(t, want, figure.Count(n))
	}
	require.Equal(t, "10,000", figure.Count(10_000))
}

func TestMoneyHasTheDecimalsOfItsCurrency(t *testing.T) {
	t.Parallel()
	for want, got := range map[string]string{
		"12.90 EUR":                     figure.Money(1290, "EUR"),
		"0.05 USD":                      figure.Money(5, "USD"),
		"1,290 JPY":                     figure.Money(1290, "JPY"),
		"1.290 KWD":                     figure.Money(1290, "KWD"),
		"1,000,000.00 EUR":              figure.Money(100_000_000, "EUR"),
		"92,233,720,368,547,758.07 EUR": figure.Money(math.MaxInt64, "EUR"),
		"":                              figure.Money(0, ""),
	} {
		require.Equal(t, want, got)
	}
}

func TestPrintableQuotesMisleadingCharacters(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"": "", "Zoë, “the” one": "Zoë, “the” one", "\x1b[2J": `"\x1b[2J"`,
		"\u202egpj.exe": `"\u202egpj.exe"`, "a\u2066b": `"a\u2066b"`, "a\u200bb": `"a\u200bb"`, "a\u2028b": `"a\u2028b"`,
		"\U0001F469\u200d\U0001F4BB": "\U0001F469\u200d\U0001F4BB",
		"a\nb":                       `"a\nb"`, "\u009b2J": `"\u009b2J"`,
		"\xff": `"\xff"`, "\x7f": `"\x7f"`, "a\x00": `"a\x00"`,
	} {
		require.Equal(t, want, figure.Printable(text))
	}
}
