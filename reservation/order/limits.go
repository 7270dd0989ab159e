package order

import (
	"time"
)

// Bounds of a sale's terms. They keep every number far inside what Lua's doubles hold exactly.
const (
	MaxStock         = 100_000_000
	MaxPerOrder      = 1_000_000
	MaxPaymentWindow = 30 * 24 * time.Hour
	MaxNameBytes     = 200
	MaxUserBytes     = 128
	MaxKeyBytes      = 255
)
