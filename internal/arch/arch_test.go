package arch_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/arch"
)

func TestThisModuleKeepsItsShape(t *testing.T) {
	found, err := arch.Check("../..")
	require.NoError(t, err)
	assert.Empty(t, found)
}

// sound is a module that breaks no rule. Each case below adds files to it.
var sound = map[string]string{
	"go.mod":       "module stampede\n",
	"lua/lua.go":   "// Package lua is documented.\npackage lua\n",
	"sql/sql.go":   "// Package sql is documented.\npackage sql\n",
	"lock/lock.go": "// Package lock is documented.\npackage lock\n\nimport _ \"stampede/lua\"\n",
	"cmd/stampede/main.go": "// Command stampede is documented.\npackage main\n\nimport _ " +
		"\"stampede/ingress\"\nimport _ \"stampede/internal/demo\"\n",
	"ingress/ingress.go":     "// Package ingress is documented.\npackage ingress\n\nimport _ \"stampede/reservation\"\n",
	"internal/demo/demo.go":  "// Package demo is documented.\npackage demo\n\nimport _ \"stampede/fulfillment\"\n",
	"internal/demo/other.go": "package demo\n",
}

func TestWhatBreaksTheRulesIsFound(t *testing.T) {
	for name, test := range map[string]struct {
		file, source string
		want         string
	}{
		"nothing is added": {"ingress/doc.txt", "", ""},
		"a script package that imports": {
			"lua/more.go", "package lua\n\nimport _ \"stampede/reservation\"\n",
			"lua/more.go: lua imports reservation, which points the wrong way",
		},
		"a lock that knows its user": {
			"lock/more.go", "package lock\n\nimport _ \"stampede/fulfillment\"\n",
			"lock/more.go: lock imports fulfillment, which points the wrong way",
		},
		"roles that see each other": {
			"ingress/more.go", "package ingress\n\nimport ledger \"stampede/fulfillment\"\n",
			"ingress/more.go: ingress imports fulfillment, which points the wrong way",
		},
		"an import under a build tag": {
			"ingress/more.go", "//go:build windows\n\npackage ingress\n\nimport _ \"stampede/fulfillment\"\n",
			"ingress/more.go: ingress imports fulfillment, which points the wrong way",
		},
		"an internal package that imports a role": {
			"internal/connect/connect.go",
			"// Package connect is documented.\npackage connect\n\nimport _ \"stampede/ingress\"\n",
			"internal/connect/connect.go: internal/connect imports ingress, which is for cmd and internal/demo",
		},
		"a package that imports a command": {
			"internal/demo/more.go", "package demo\n\nimport _ \"stampede/cmd/stampede\"\n",
			"internal/demo/more.go: internal/demo imports cmd/stampede, which is nobody's library",
		},
		"a command that imports the test kit": {
			"cmd/stampede/more.go", "package main\n\nimport _ \"stampede/internal/testkit\"\n",
			"cmd/stampede/more.go: cmd/stampede imports internal/testkit, which is for tests only",
		},
		"a package without a rule": {
			"billing/billing.go", "// Package billing is documented.\npackage billing\n\nimport _ \"stampede/sql\"\n",
			"billing/billing.go: billing imports sql, which needs a rule in internal/arch: this package has none",
		},
		"a test may import what it likes": {
			"ingress/more_test.go",
			"package ingress\n\nimport _ \"stampede/fulfillment\"\nimport _ \"stampede/internal/testkit\"\n", "",
		},
		"a package whose name only begins like ours": {
			"ingress/more.go", "package ingress\n\nimport _ \"stampede2/fulfillment\"\n", "",
		},
		"test data is no code": {"ingress/testdata/more.go", "not Go at all", ""},
		"a package without a comment": {
			"reservation/sale.go", "package reservation\n",
			"reservation: no file of the package has a package comment",
		},
		"a package of tests needs no comment": {"e2e/e2e_test.go", "package e2e\n", ""},
		"a file that is too long": {
			"ingress/more.go", "package ingress\n" + strings.Repeat("\n", 550),
			"ingress/more.go: 551 lines, want at most 550",
		},
		"a file as long as may be": {"ingress/more.go", "package ingress\n" + strings.Repeat("\n", 549), ""},
		"a context that is put off": {
			"ingress/more.go", "package ingress\n\nimport \"context\"\n\nvar ctx = context.TODO()\n",
			"ingress/more.go: line 5 calls context.TODO: pass the caller's context",
		},
		"a sleep in a test, under another name": {
			"ingress/more_test.go", "package ingress\n\nimport clock \"time\"\n\nfunc f() { clock.Sleep(1) }\n",
			"ingress/more_test.go: line 5 calls time.Sleep: wait for a state, or for a timer and the context",
		},
		"a Sleep that is not of time": {
			"ingress/more.go", "package ingress\n\nvar time struct{ Sleep int }\n\nvar f = time.Sleep\n", "",
		},
		"the loop that waits for all tests": {
			"internal/testkit/eventually.go",
			"// Package testkit is documented.\npackage testkit\n\nimport \"time\"\n\nfunc f() { time.Sleep(1) }\n", "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			root := t.TempDir()
			write(t, root, sound)
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

func TestANestedModuleIsNotThisModule(t *testing.T) {
	root := t.TempDir()
	write(t, root, sound)
	write(t, root, map[string]string{
		"tools/go.mod":  "module tools\n",
		"tools/tool.go": "package tools\n\nimport _ \"stampede/cmd/stampede\"\n",
	})
	found, err := arch.Check(root)
	require.NoError(t, err)
	assert.Empty(t, found)
}

func TestWhatCannotBeReadIsAnError(t *testing.T) {
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
