package testshop

import (
	"time"
)

// Soon bounds what a test waits for.
const Soon = 30 * time.Second
