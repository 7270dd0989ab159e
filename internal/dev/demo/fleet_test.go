package demo

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Writes of a log may end anywhere, and other lines may come first.
func TestAddrWatchFindsAddressAcrossWrites(t *testing.T) {
	t.Parallel()
	const log = "not JSON\n" + `{"level":"WARN","msg":"other","addr":"no"}` + "\n" +
		`{"level":"INFO","msg":"ingress listens","addr":"127.0.0.1:4711","auth":"header"}` + "\n" + `{"msg":"later"}` + "\n"
	for size := 1; size <= len(log); size++ {
		w := newAddrWatch("ingress listens")
		for rest := log; rest != ""; {
			piece := rest[:min(size, len(rest))]
			n, err := w.Write([]byte(piece))
			require.NoError(t, err)
			require.Equal(t, len(piece), n)
			rest = rest[n:]
		}
		require.Len(t, w.addr, 1, "pieces of %d", size)
		assert.Equal(t, "127.0.0.1:4711", <-w.addr)
	}
}
