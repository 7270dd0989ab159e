package testwork

import (
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/upkeep/projection"
)

func RebuildProjections(s *testshop.Shop, t testing.TB) projection.Report {
	t.Helper()
	report, err := projection.Rebuild(t.Context(), s.Pool)
	require.NoError(t, err)
	return report
}
