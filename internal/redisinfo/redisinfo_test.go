package redisinfo

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestInfoIsParsed(t *testing.T) {
	t.Parallel()
	s := parse("# Memory\r\nused_memory:1048576\r\nused_memory_human:1M\r\nmaxmemory:2097152\r\n" +
		"# Persistence\r\naof_enabled:1\r\naof_last_write_status:err\r\naof_delayed_fsync:7\r\n# CPU\r\nused_cpu_sys:1.5\r\n")
	require.Equal(t, Server{
		UsedBytes: 1 << 20, MaxBytes: 2 << 20, LogOn: true, LogFails: true, DelayedSyncs: 7,
		Numbers: map[string]float64{
			"used_memory": 1 << 20, "maxmemory": 2 << 20, "aof_enabled": 1, "aof_delayed_fsync": 7, "used_cpu_sys": 1.5,
		},
	}, s)
}
