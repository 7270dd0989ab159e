package order

import (
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Limits of terms and identifiers. Lua's doubles hold all of these numbers exactly.
const (
	MaxStock         = 100_000_000
	MaxPerOrder      = 1_000_000
	MaxPaymentWindow = 30 * 24 * time.Hour
	MaxNameRunes     = 200
	MaxUserBytes     = 128
	maxKeyBytes      = 255 // of an idempotency key
	// MaxPerMessage is how many orders a message of the stream may hold.
	MaxPerMessage = 256
)

// ValidateText returns an *InvalidError for a text for people that is not 1 to most characters of UTF-8 without control
// characters, or has only characters that nobody sees.
func ValidateText(field, text string, most int) error {
	switch {
	case !utf8.ValidString(text):
		return &InvalidError{field, "must be UTF-8"}
	case utf8.RuneCountInString(text) > most || !strings.ContainsFunc(text, isVisible):
		return &InvalidError{field, fmt.Sprintf("must be 1 to %d characters, not only spaces", most)}
	case strings.ContainsFunc(text, unicode.IsControl):
		return &InvalidError{field, "must not contain control characters"}
	}
	return nil
}

// isVisible is false for spaces and for what is shown as nothing, such as U+200B or the Hangul filler.
func isVisible(r rune) bool {
	const brailleBlank = '\u2800'
	return r != brailleBlank && !unicode.In(r, unicode.White_Space, unicode.Cc, unicode.Cf,
		unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector)
}
