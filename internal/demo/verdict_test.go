package demo

import (
	"bytes"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/crowd"
	"stampede/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// Who could not look has no verdict: neither that all was kept, nor that something is broken.
func TestWhatCouldNotBeLookedAtIsNotKept(t *testing.T) {
	t.Parallel()
	for promise, blind := range map[string]func(t *testing.T, d *demo){
		"S5": func(t *testing.T, d *demo) {
			_, err := d.pool.Exec(t.Context(), "ALTER TABLE orders RENAME COLUMN reason TO cause")
			require.NoError(t, err)
		},
		// It is shown only if it is not kept.
		"S7": func(t *testing.T, d *demo) {
			d.redis = redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1})
			t.Cleanup(func() { _ = d.redis.Close() })
		},
	} {
		t.Run(promise, func(t *testing.T) {
			t.Parallel()
			d, told := emptyDemo(t)
			require.NoError(t, d.judge(t.Context(), crowd.Report{}, crowd.Comparison{}), told)
			require.Contains(t, told.String(), "\nEvery promise was kept.\n")
			told.Reset()

			blind(t, d)
			require.ErrorIs(t, d.judge(t.Context(), crowd.Report{}, crowd.Comparison{}), ErrUnchecked, told)
			require.Contains(t, told.String(), "? "+promise)
			require.Contains(t, told.String(), "      ? could not look: ")
			require.NotContains(t, told.String(), "✓ "+promise)
			require.Contains(t, told.String(), "\nNOT EVERY PROMISE COULD BE CHECKED.\n")
			told.Reset()

			// Broken wins.
			require.ErrorIs(t, d.judge(t.Context(), crowd.Report{}, crowd.Comparison{Contradictions: 1}), ErrBroken, told)
			require.Contains(t, told.String(), "      ? could not look: ")
			require.Contains(t, told.String(), "✗ S2")
			require.Contains(t, told.String(), "\nA PROMISE IS BROKEN.\n")
		})
	}
}

// emptyDemo has sold nothing.
func emptyDemo(t *testing.T) (*demo, *bytes.Buffer) {
	t.Helper()
	told := new(bytes.Buffer)
	return &demo{story: newStory(told, false), pool: testkit.Pool(t), redis: testkit.Redis(t), keys: testkit.Keys(t)}, told
}
