// Package format formats numbers and untrusted texts for people.
package format

import (
	"cmp"
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Count formats a number with thousands separators: 10,000.
func Count[N int | int64](n N) string {
	text := strconv.FormatInt(int64(n), 10)
	sign := ""
	if n < 0 {
		sign, text = "-", text[1:]
	}
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return sign + text
}

// Bytes formats a size in the units of powers of 1024, in which servers take their limits of memory: 512 MiB, 1.5 GiB.
func Bytes(n float64) string {
	switch {
	case n < 1<<20:
		return strconv.FormatFloat(math.Ceil(n/(1<<10)), 'f', 0, 64) + " KiB"
	case n < 1<<30:
		return strconv.FormatFloat(n/(1<<20), 'f', 0, 64) + " MiB"
	}
	return strconv.FormatFloat(n/(1<<30), 'f', 1, 64) + " GiB"
}

// digits has the currencies of ISO 4217 whose minor unit is not a hundredth, by the digits after the point.
var digits = map[int]string{
	0: "BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX UYI VND VUV XAF XOF XPF",
	3: "BHD IQD JOD KWD LYD OMR TND",
	4: "CLF UYW",
}

func digitsOf(currency string) int {
	for n, currencies := range digits {
		if currency != "" && strings.Contains(currencies, currency) {
			return n
		}
	}
	return 2
}

// Money formats an amount in minor units of a currency of ISO 4217: 1,234.50 EUR. No amount of no currency is empty.
func Money(minor int64, currency string) string {
	n := digitsOf(currency)
	switch {
	case minor == 0 && currency == "":
		return ""
	case currency == "" || n == 0:
		return Count(minor) + " " + cmp.Or(currency, "minor units")
	}
	text := fmt.Sprintf("%0*d", n+1, minor)
	at := len(text) - n
	whole, _ := strconv.ParseInt(text[:at], 10, 64) // digits of an int64
	return Count(whole) + "." + text[at:] + " " + currency
}

// ParseMoney reads an amount such as 49 or 49.50 into minor units of a currency.
func ParseMoney(text, currency string) (minor int64, ok bool) {
	whole, part, _ := strings.Cut(text, ".")
	missing := digitsOf(currency) - len(part)
	if whole == "" || missing < 0 {
		return 0, false
	}
	all := whole + part + strings.Repeat("0", missing)
	minor, err := strconv.ParseInt(all, 10, 64)
	return minor, err == nil && strings.Trim(all, "0123456789") == ""
}

// Printable makes untrusted text safe for a terminal: text with characters that Misleads, or invalid UTF-8, is quoted
// as in Go.
func Printable(text string) string {
	if !utf8.ValidString(text) || strings.ContainsFunc(text, Misleads) {
		return fmt.Sprintf("%q", text)
	}
	return text
}

// Cell makes untrusted text a cell of a CSV file. A spreadsheet runs what looks like a formula at the begin of a cell,
// and where people write decimals with a comma it splits at semicolons, whatever stands in quotes. So an apostrophe is
// put before it at the begin of the text and behind each other separator; also before an apostrophe, so that the text
// can be told from the mark, and before a quote, behind which a formula may be.
func Cell(text string) string {
	var cell strings.Builder
	before := ';'
	for _, r := range text {
		if strings.ContainsRune(";|\t\r\n", before) && strings.ContainsRune("=+-@\uff1d\uff0b\uff0d\uff20\t\r\n'\"", r) {
			cell.WriteByte('\'')
		}
		cell.WriteRune(r)
		before = r
	}
	return cell.String()
}

// Misleads is true for characters that control a terminal, reorder what is beside them, or are shown as nothing, except
// for the joiners, which emoji and some scripts need.
func Misleads(r rune) bool {
	const nonJoiner, joiner = '\u200c', '\u200d'
	return unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp, unicode.Co) && r != nonJoiner && r != joiner
}
