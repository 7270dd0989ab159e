package demo

import (
	"bytes"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/loadgen"
	"stampede/internal/test/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// A promise that could not be checked is neither kept nor broken.
func TestUncheckedPromiseIsNotKept(t *testing.T) {
	t.Parallel()
	for promise, breakCheck := range map[string]func(t *testing.T, d *demo){
		"S5": func(t *testing.T, d *demo) {
			_, err := d.pool.Exec(t.Context(), "ALTER TABLE orders RENAME COLUMN reason TO cause")
			require.NoError(t, err)
		},
		// S7 is shown only if it is not kept.
		"S7": func(t *testing.T, d *demo) {
			d.redis = redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1})
			t.Cleanup(func() { _ = d.redis.Close() })
		},
	} {
		t.Run(promise, func(t *testing.T) {
			t.Parallel()
			d, output := emptyDemo(t)
			require.NoError(t, d.judge(t.Context(), loadgen.Report{}, loadgen.Comparison{}), output)
			require.Contains(t, output.String(), "\nEvery promise was kept.\n")
			output.Reset()

			breakCheck(t, d)
			require.ErrorIs(t, d.judge(t.Context(), loadgen.Report{}, loadgen.Comparison{}), ErrUnchecked, output)
			require.Contains(t, output.String(), "? "+promise)
			require.Contains(t, output.String(), "      ? not checked: ")
			require.NotContains(t, output.String(), "✓ "+promise)
			require.Contains(t, output.String(), "\nNOT EVERY PROMISE COULD BE CHECKED.\n")
			output.Reset()

			// Broken wins.
			require.ErrorIs(t, d.judge(t.Context(), loadgen.Report{}, loadgen.Comparison{Contradictions: 1}), ErrBroken, output)
			require.Contains(t, output.String(), "      ? not checked: ")
			require.Contains(t, output.String(), "✗ S2")
			require.Contains(t, output.String(), "\nA PROMISE IS BROKEN.\n")
		})
	}
}

// emptyDemo returns a demo that has sold nothing.
func emptyDemo(t *testing.T) (*demo, *bytes.Buffer) {
	t.Helper()
	output := new(bytes.Buffer)
	d := &demo{story: newStory(output, false), pool: testkit.Pool(t), redis: testkit.Redis(t), keys: testkit.Keys(t)}
	return d, output
}

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
