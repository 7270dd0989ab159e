package sql_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/sql"
)

func TestStatementsAreNamedAfterTheirFiles(t *testing.T) {
	t.Parallel()
	for statement, want := range map[string]string{
		sql.LedgerRecordFresh:            "ledger/record_fresh",
		sql.RelayReadOrders:              "relay/read_orders",
		"COMMIT":                         "COMMIT",
		"SET LOCAL lock_timeout = 2000":  "SET",
		"begin; SET LOCAL lock_timeout;": "begin",
		"":                               "",
	} {
		require.Equal(t, want, sql.NameOf(statement))
	}
}
