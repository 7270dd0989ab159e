package order

import "time"

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
