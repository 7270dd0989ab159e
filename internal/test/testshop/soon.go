package testshop

import (
	"time"
)

// Soon bounds what a test waits for. It is long, because a busy machine is slow and not wrong.
const Soon = 2 * time.Minute
