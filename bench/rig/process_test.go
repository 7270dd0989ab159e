package rig

import (
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A loop in the shell is work in user mode. Waiting for a child is not.
func TestCPUTimeIncludesChildren(t *testing.T) {
	t.Parallel()
	const loop = `i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done`
	for name, text := range map[string]string{
		"ended child":   `sh -c '` + loop + `'; echo at here; read never`,
		"running child": `sh -c '` + loop + `; echo at here; read never'; exit 0`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			script := exec.Command("sh", "-c", text)
			stdin, err := script.StdinPipe()
			require.NoError(t, err)
			defer func() { _ = stdin.Close() }()
			p := Run(t, "script", "at ", script)
			assert.Equal(t, "here", p.Addr)
			assert.Less(t, ProcessCPU(t, p.Pid()), 50*time.Millisecond)
			assert.Greater(t, treeCPU(t, p.Pid()), 50*time.Millisecond)
		})
	}
}
