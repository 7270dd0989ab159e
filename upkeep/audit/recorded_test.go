package audit_test

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/upkeep/audit"
)

func TestLatestIsNewestRecordedAudit(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	latest, err := audit.Latest(t.Context(), s.Pool)
	require.NoError(t, err)
	require.Nil(t, latest, "none was recorded")

	begun := time.Now().Add(-time.Minute) // the server's clock may differ
	s.Buy(t, sale, "alice")
	require.NoError(t, audit.Record(t.Context(), s.Pool, testwork.Audit(t, s, uuid.Nil), "ann"))
	latest, err = audit.Latest(t.Context(), s.Pool)
	require.NoError(t, err)
	require.True(t, latest.At.After(begun))
	latest.At = time.Time{}
	require.Equal(t, &audit.Recorded{Operator: "ann", Broken: []string{"S3"}, Unchecked: []string{}}, latest)

	testwork.Fulfil(t, s)
	require.NoError(t, audit.Record(t.Context(), s.Pool, testwork.Audit(t, s, uuid.Nil), ""))
	latest, err = audit.Latest(t.Context(), s.Pool)
	require.NoError(t, err)
	latest.At = time.Time{}
	require.Equal(t, &audit.Recorded{Broken: []string{}, Unchecked: []string{}}, latest)

	moved := audit.Report{Moved: true, Promises: []audit.Promise{
		{Name: "S1", Found: 2},
		{Name: "S2"},
		{Name: "S4", Found: 1, Unchecked: []string{"no answer"}},
		{Name: "S7", Unchecked: []string{"no answer"}},
	}}
	require.NoError(t, audit.Record(t.Context(), s.Pool, moved, "bob"))
	latest, err = audit.Latest(t.Context(), s.Pool)
	require.NoError(t, err)
	latest.At = time.Time{}
	require.Equal(t, &audit.Recorded{
		Operator: "bob", Broken: []string{"S1", "S4"}, Unchecked: []string{"S4", "S7"}, Moving: true,
	}, latest)
}

func TestRecordKeepsNewestThousand(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testshop.Exec(t, pool, `INSERT INTO audits (operator, broken, unchecked, moving)
		SELECT 'old ' || n, '{}', '{}', false FROM generate_series(1, 1005) AS n`)
	require.NoError(t, audit.Record(t.Context(), pool, audit.Report{}, "new"))
	var kept int
	var oldest string
	require.NoError(t, pool.QueryRow(t.Context(),
		"SELECT count(*), (array_agg(operator ORDER BY id))[1] FROM audits").Scan(&kept, &oldest))
	require.Equal(t, 1000, kept)
	require.Equal(t, "old 7", oldest)
	latest, err := audit.Latest(t.Context(), pool)
	require.NoError(t, err)
	require.Equal(t, "new", latest.Operator)
}
