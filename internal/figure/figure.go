// Package figure formats numbers and untrusted texts for people.
package figure

import "strconv"

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
