// Package figure formats numbers and untrusted texts for people.
package figure

import (
	"fmt"
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

// Money formats an amount in minor units of a currency (ISO 4217): 12.90 EUR, 1,290 JPY. It is empty without a currency.
func Money(minor int64, currency string) string {
	decimals := 2
	switch currency {
	case "":
		return ""
	case "BIF", "CLP", "DJF", "GNF", "ISK", "JPY", "KMF", "KRW", "PYG", "RWF", "UGX", "UYI", "VND", "VUV", "XAF", "XOF", "XPF":
		return Count(minor) + " " + currency
	case "BHD", "IQD", "JOD", "KWD", "LYD", "OMR", "TND":
		decimals = 3
	}
	digits := fmt.Sprintf("%0*d", decimals+1, minor)
	major, _ := strconv.ParseInt(digits[:len(digits)-decimals], 10, 64) // it is a number
	return fmt.Sprintf("%s.%s %s", Count(major), digits[len(digits)-decimals:], currency)
}

// Printable makes untrusted text safe for a terminal: text with characters that Misleads, or invalid UTF-8, is quoted
// as in Go.
func Printable(text string) string {
	if !utf8.ValidString(text) || strings.ContainsFunc(text, Misleads) {
		return fmt.Sprintf("%q", text)
	}
	return text
}

// Cell makes untrusted text a cell of a spreadsheet, which would run one that looks like a formula: it then begins with
// an apostrophe, as does one that begins with an apostrophe, so that the text can be told from the mark.
func Cell(text string) string {
	if text != "" && strings.ContainsRune("=+-@\t\r\n'", rune(text[0])) {
		return "'" + text
	}
	return text
}

// Misleads is true for characters that control a terminal, reorder what is beside them, or are shown as nothing, except
// for the joiners, which emoji and some scripts need.
func Misleads(r rune) bool {
	const nonJoiner, joiner = '\u200c', '\u200d'
	return unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp, unicode.Co) && r != nonJoiner && r != joiner
}
