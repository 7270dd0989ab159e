package doctor_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/upkeep/doctor"
)

func TestClocksThatAreApartAreFound(t *testing.T) {
	t.Parallel()
	server, set := testkit.ClockedPostgres(t)
	pool, rdb := testkit.PoolAt(t, server.URL, 1), testkit.Redis(t)
	look := func() []doctor.Finding {
		findings, err := doctor.Clocks(t.Context(), rdb, pool)
		require.NoError(t, err)
		return findings
	}
	assert.Empty(t, look())
	for ahead, want := range map[time.Duration]string{
		time.Hour:  `^the clock of (this server|this machine) is (1h0m0s|59m59\.\d+s) behind that of Postgres$`,
		-time.Hour: `^the clock of (this server|this machine) is (1h0m0s|59m59\.\d+s) ahead of that of Postgres$`,
	} {
		set(ahead)
		findings := look()
		require.Len(t, findings, 2)
		for n, server := range []string{"redis", "postgres"} {
			assert.Equal(t, server, findings[n].Server)
			assert.Equal(t, doctor.Warning, findings[n].Severity)
			assert.Regexp(t, want, findings[n].What)
		}
	}
}
