package testshop

import (
	"time"
)

// Soon bounds what a test waits for.
const Soon = 10 * time.Second
