package figure

import (
	"fmt"
	"unicode/utf8"
)

// Printable is text that anybody may have written, made safe for a terminal: quoted as in Go if it holds
// control characters or is not UTF-8.
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
