//go:build system

package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/upkeep/audit"
)

func TestWholeAuditIsRecorded(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	latest := func() *audit.Recorded {
		recorded, err := audit.Latest(t.Context(), s.pool)
		require.NoError(t, err)
		if recorded != nil {
			recorded.At = time.Time{}
		}
		return recorded
	}
	sale, _ := s.recorded()
	s.ends(exitOK, "audit", "--sale="+sale.String(), "--operator=ann")
	require.Nil(t, latest(), "an audit of one sale says nothing about the others")

	s.ends(exitOK, "audit", "--operator=ann")
	require.Equal(t, &audit.Recorded{Operator: "ann", Broken: []string{}, Unchecked: []string{}}, latest())

	_, err := s.pool.Exec(t.Context(), "ALTER TABLE sales RENAME CONSTRAINT sales_not_oversold TO aside")
	require.NoError(t, err)
	s.ends(exitFailed, "audit", "--operator=bob", "--output=json")
	require.Equal(t, &audit.Recorded{Operator: "bob", Broken: []string{"DB"}, Unchecked: []string{}}, latest())

	// Without a record of it the verdict is the same.
	_, err = s.pool.Exec(t.Context(), "ALTER TABLE sales RENAME CONSTRAINT aside TO sales_not_oversold; "+
		"ALTER TABLE audits ADD CONSTRAINT audits_full CHECK (operator <> 'eve')")
	require.NoError(t, err)
	output := s.ends(exitOK, "audit", "--operator=eve")
	assert.Contains(t, output, "the verdict is not recorded")
	assert.Contains(t, output, "S1  nothing is oversold                kept")
	require.Equal(t, "bob", latest().Operator)
}
