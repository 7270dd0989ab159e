package format_test

import (
	"encoding/csv"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/internal/format"
)

func TestCountSeparatesThousands(t *testing.T) {
	t.Parallel()
	for n, want := range map[int64]string{
		0: "0", 7: "7", 999: "999", 1000: "1,000", 123456: "123,456", 1234567: "1,234,567",
		-1: "-1", -999: "-999", -1000: "-1,000", math.MinInt64: "-9,223,372,036,854,775,808",
	} {
		require.Equal(t, want, format.Count(n))
	}
	require.Equal(t, "10,000", format.Count(10_000))
}

func TestMoneyHasTheDigitsOfItsCurrency(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		minor          int64
		currency, want string
	}{
		{5, "EUR", "0.05 EUR"},
		{123450, "EUR", "1,234.50 EUR"},
		{1234, "JPY", "1,234 JPY"},
		{1234567, "KWD", "1,234.567 KWD"},
		{0, "USD", "0.00 USD"},
		{1, "CLF", "0.0001 CLF"},
		{1200, "", "1,200 minor units"},
		{0, "", ""},
		{math.MaxInt64, "EUR", "92,233,720,368,547,758.07 EUR"},
	} {
		require.Equal(t, c.want, format.Money(c.minor, c.currency))
	}
	for _, c := range []struct {
		text, currency string
		want           int64
	}{
		{"49", "EUR", 4900},
		{"49.5", "EUR", 4950},
		{"0.01", "EUR", 1},
		{"49", "JPY", 49},
		{"1.234", "KWD", 1234},
		{"49.", "EUR", 4900},
	} {
		minor, ok := format.ParseMoney(c.text, c.currency)
		require.True(t, ok, c.text)
		require.Equal(t, c.want, minor)
	}
	for _, text := range []string{"", ".5", "49,5", "1.234", "-1", "+1", "1.-5", "1.+5", "1e3", "9223372036854775807"} {
		_, ok := format.ParseMoney(text, "EUR")
		require.False(t, ok, text)
	}
	_, ok := format.ParseMoney("49.5", "JPY")
	require.False(t, ok)
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
		require.Equal(t, want, format.Printable(text))
	}
}

func TestBytesHaveOneKindOfUnit(t *testing.T) {
	t.Parallel()
	for n, want := range map[float64]string{
		1: "1 KiB", 2048: "2 KiB", 512 << 20: "512 MiB", 4 << 30: "4.0 GiB", 1.26 * (1 << 30): "1.3 GiB",
	} {
		require.Equal(t, want, format.Bytes(n))
	}
}

// However a spreadsheet splits a file, no cell is a formula.
func TestCellIsNoFormula(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"": "", "ann": "ann", "a=b; c": "a=b; c", "=1": "'=1", "'x": "''x", "-1": "'-1", "＝1": "'＝1",
		"a;=1+1": "a;'=1+1", "a;b;@c": "a;b;'@c", "a\t+1": "a\t'+1", "a|-1": "a|'-1", "a\n=1": "a\n'=1",
		"a;\"=1\"": "a;'\"=1\"", "a;'=1": "a;''=1", "a,=1": "a,=1", "\t=1": "'\t'=1", "a;\r\n=1": "a;'\r'\n'=1",
	} {
		cell := format.Cell(text)
		require.Equal(t, want, cell)
		var file strings.Builder
		rows := csv.NewWriter(&file)
		require.NoError(t, rows.Write([]string{"id", cell, "x"}))
		rows.Flush()
		read, err := csv.NewReader(strings.NewReader(file.String())).Read()
		require.NoError(t, err)
		isSeparator := func(r rune) bool { return strings.ContainsRune(";|\t\n\r", r) }
		cells := append(strings.FieldsFunc(file.String(), isSeparator), read...)
		for _, c := range cells {
			require.NotRegexp(t, `^"*[=+\-@＝＋－＠]`, c, "%q", text)
		}
	}
}
