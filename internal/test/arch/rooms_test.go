package arch_test

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Who embeds one room gets what that room needs, and not what programs are made of, such as an exporter of spans.
func TestRoomsBringFewPackages(t *testing.T) {
	t.Parallel()
	for room, most := range map[string]int{"lock": 21, "reservation": 115, "ingress": 168} {
		t.Run(room, func(t *testing.T) {
			t.Parallel()
			list := exec.CommandContext(t.Context(), "go", "list", "-deps",
				"-f", "{{if not (or .Standard .Module.Main)}}{{.ImportPath}}{{end}}", "./"+room)
			list.Dir = "../../.."
			out, err := list.Output()
			require.NoError(t, err)
			brings := strings.Fields(string(out))
			require.NotEmpty(t, brings)
			require.LessOrEqual(t, len(brings), most, "packages of other modules: %v", brings)
		})
	}
}
