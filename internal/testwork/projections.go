package testwork

import (
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/fulfillment"
	"stampede/internal/testkit"
	"stampede/internal/testshop"
)

func RebuildProjections(s *testshop.Shop, t testing.TB) fulfillment.ProjectionsReport {
	t.Helper()
	report, err := fulfillment.RebuildProjections(t.Context(), s.Pool, testkit.Logger(t))
	require.NoError(t, err)
	return report
}
