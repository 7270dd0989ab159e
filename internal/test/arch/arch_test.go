package arch_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/arch"
)

func TestModuleKeepsRules(t *testing.T) {
	found, err := arch.Check("../../..")
	require.NoError(t, err)
	assert.Empty(t, found)
}

// valid is a module that breaks no rule. Each case below adds a file to it.
var valid = map[string]string{
	"go.mod":       "module stampede\n",
	"lua/lua.go":   "// Package lua is documented.\npackage lua\n",
	"sql/sql.go":   "// Package sql is documented.\npackage sql\n",
	"lock/lock.go": "// Package lock is documented.\npackage lock\n\nimport _ \"stampede/lua\"\n",
	"cmd/stampede/main.go": "// Command stampede is documented.\npackage main\n\nimport _ " +
		"\"stampede/ingress\"\nimport _ \"stampede/internal/dev/demo\"\n",
	"ingress/ingress.go":         "// Package ingress is documented.\npackage ingress\n\nimport _ \"stampede/reservation\"\n",
	"internal/dev/demo/demo.go":  "// Package demo is documented.\npackage demo\n\nimport _ \"stampede/upkeep/audit\"\n",
	"internal/dev/demo/other.go": "package demo\n",
}

func TestCheckFindsViolations(t *testing.T) {
	for name, test := range map[string]struct {
		file, source string
		want         string
	}{
		"no violation": {"ingress/doc.txt", "", ""},
		"scripts import another package": {
			"lua/more.go", "package lua\n\nimport _ \"stampede/reservation\"\n",
			"lua/more.go: lua imports reservation, which points the wrong way",
		},
		"lock imports its user": {
			"lock/more.go", "package lock\n\nimport _ \"stampede/fulfillment\"\n",
			"lock/more.go: lock imports fulfillment, which points the wrong way",
		},
		"one role imports another": {
			"ingress/more.go", "package ingress\n\nimport ledger \"stampede/fulfillment\"\n",
			"ingress/more.go: ingress imports fulfillment, which points the wrong way",
		},
		"import in a file with a build tag": {
			"ingress/more.go", "//go:build windows\n\npackage ingress\n\nimport _ \"stampede/fulfillment\"\n",
			"ingress/more.go: ingress imports fulfillment, which points the wrong way",
		},
		"internal package imports a role": {
			"internal/connect/connect.go",
			"// Package connect is documented.\npackage connect\n\nimport _ \"stampede/ingress\"\n",
			"internal/connect/connect.go: internal/connect imports ingress, which points the wrong way",
		},
		"package imports a command": {
			"internal/dev/demo/more.go", "package demo\n\nimport _ \"stampede/cmd/stampede\"\n",
			"internal/dev/demo/more.go: internal/dev/demo imports cmd/stampede, which points the wrong way",
		},
		"command imports testkit": {
			"cmd/stampede/more.go", "package main\n\nimport _ \"stampede/internal/test/testkit\"\n",
			"cmd/stampede/more.go: cmd/stampede imports internal/test/testkit, which is for tests only",
		},
		"store imports what runs the product": {
			"ledger/ledger.go", "// Package ledger is documented.\npackage ledger\n\nimport _ \"stampede/internal/dev/demo\"\n",
			"ledger/ledger.go: ledger imports internal/dev/demo, which points the wrong way",
		},
		"one room": {"ledger/sub/a.go", "// Package sub is documented.\npackage sub\n\nimport _ \"stampede/ledger\"\n", ""},
		"room without a rule": {
			"billing/billing.go", "// Package billing is documented.\npackage billing\n\nimport _ \"stampede/sql\"\n",
			"billing/billing.go: billing imports sql, which needs a rule in internal/test/arch: this room has none",
		},
		"test imports a role": {
			"ingress/more_test.go",
			"package ingress\n\nimport _ \"stampede/fulfillment\"\nimport _ \"stampede/internal/test/testkit\"\n", "",
		},
		"module with the same prefix": {
			"ingress/more.go", "package ingress\n\nimport _ \"stampede2/fulfillment\"\n", "",
		},
		"invalid Go in testdata": {"ingress/testdata/more.go", "not Go at all", ""},
		"package without a comment": {
			"reservation/sale.go", "package reservation\n",
			"reservation: no file of the package has a package comment",
		},
		"package of tests without a comment": {"e2e/e2e_test.go", "package e2e\n", ""},
		"file too long": {
			"ingress/more.go", "package ingress\n" + strings.Repeat("\n", 550),
			"ingress/more.go: 551 lines, want at most 550",
		},
		"file of maximum length": {"ingress/more.go", "package ingress\n" + strings.Repeat("\n", 549), ""},
		"context.TODO": {
			"ingress/more.go", "package ingress\n\nimport \"context\"\n\nvar ctx = context.TODO()\n",
			"ingress/more.go: line 5 calls context.TODO: pass the caller's context",
		},
		"time.Sleep in a test, with an import alias": {
			"ingress/more_test.go", "package ingress\n\nimport clock \"time\"\n\nfunc f() { clock.Sleep(1) }\n",
			"ingress/more_test.go: line 5 calls time.Sleep: wait for a state, or for a timer and the context",
		},
		"Sleep of a variable called time": {
			"ingress/more.go", "package ingress\n\nvar time struct{ Sleep int }\n\nvar f = time.Sleep\n", "",
		},
		"event stream with a head of its own": {
			"ingress/more.go", "package ingress\n\nvar head = \"text/event-stream; charset=utf-8\"\n",
			"ingress/more.go: line 3 has text/event-stream: call accept.EventStream, so that no gateway holds the stream back",
		},
		"test that reads an event stream": {
			"ingress/more_test.go", "package ingress\n\nvar head = \"text/event-stream\"\n", "",
		},
		"system test": {"ingress/more_test.go", "//go:build system && linux\n\npackage ingress\n\nfunc TestX() {}\n", ""},
		"system test that no task finds": {
			"ingress/more_test.go", "//go:build linux && system\n\npackage ingress\n",
			`ingress/more_test.go: the constraint "linux && system" does not begin with system: no task runs these tests`,
		},
		"benchmark with the tag of system tests": {
			"ingress/more_test.go", "//go:build system\n\npackage ingress\n\nfunc BenchmarkX() {}\n",
			"ingress/more_test.go: BenchmarkX has the tag system: no task runs it",
		},
		"the exempted time.Sleep": {
			"internal/test/testkit/testkit.go",
			"// Package testkit is documented.\npackage testkit\n\nimport \"time\"\n\nfunc f() { time.Sleep(1) }\n", "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			root := t.TempDir()
			write(t, root, valid)
			write(t, root, map[string]string{test.file: test.source})
			found, err := arch.Check(root)
			require.NoError(t, err)
			if test.want == "" {
				assert.Empty(t, found)
			} else {
				assert.Equal(t, []string{test.want}, found)
			}
		})
	}
}

func TestCheckSkipsNestedModules(t *testing.T) {
	root := t.TempDir()
	write(t, root, valid)
	write(t, root, map[string]string{
		"tools/go.mod":  "module tools\n",
		"tools/tool.go": "package tools\n\nimport _ \"stampede/cmd/stampede\"\n",
	})
	found, err := arch.Check(root)
	require.NoError(t, err)
	assert.Empty(t, found)
}

func TestCheckReturnsReadErrors(t *testing.T) {
	_, err := arch.Check(t.TempDir())
	require.ErrorIs(t, err, os.ErrNotExist, "no module")

	root := t.TempDir()
	write(t, root, map[string]string{"go.mod": "module stampede\n", "lua/lua.go": "package lua; func {"})
	_, err = arch.Check(root)
	require.ErrorContains(t, err, "lua/lua.go:1:")
}

func write(t *testing.T, root string, files map[string]string) {
	t.Helper()
	for name, source := range files {
		at := filepath.Join(root, filepath.FromSlash(name))
		require.NoError(t, os.MkdirAll(filepath.Dir(at), 0o755))
		require.NoError(t, os.WriteFile(at, []byte(source), 0o644))
	}
}
