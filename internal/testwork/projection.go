package testwork

import (
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/fulfillment/projection"
	"stampede/internal/testshop"
)

func RebuildProjections(s *testshop.Shop, t testing.TB) projection.Report {
	t.Helper()
	report, err := projection.Rebuild(t.Context(), s.Pool)
	require.NoError(t, err)
	return report
}
