package lua_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lua"
)

// A server may lack newer commands and commands that an operator renamed. The others are still
// checked.
func TestRightsReportMissingCommand(t *testing.T) {
	t.Parallel()
	refused, err := lua.Rights.Run(t.Context(), testkit.Redis(t), []string{"key"}, "HSET key f v", "NOSUCHCOMMAND key",
		"PING").StringSlice()
	require.NoError(t, err)
	require.Equal(t, []string{"NOSUCHCOMMAND key"}, refused)
}
