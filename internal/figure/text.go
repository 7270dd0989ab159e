package figure

import (
	"fmt"
	"unicode/utf8"
)

// Printable makes untrusted text safe for a terminal: text with control characters or invalid UTF-8 is quoted as in Go.
func Printable(text string) string {
	if !utf8.ValidString(text) {
		return fmt.Sprintf("%q", text)
	}
	for _, r := range text {
		if r < ' ' || r >= 0x7f && r < 0xa0 {
			return fmt.Sprintf("%q", text)
		}
	}
	return text
}
