package testshop

import (
	"strings"
)

var EveryByte = func() string {
	var b strings.Builder
	for i := range 256 {
		b.WriteByte(byte(i))
	}
	return b.String()
}()
