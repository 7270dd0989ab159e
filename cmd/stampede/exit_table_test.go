package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/docs"
	"stampede/internal/test/testkit"
	"stampede/reservation/problems"
)

// deadEnds are all commands, with arguments and the exit status when no server answers. A new command has to be added.
var deadEnds = map[string]struct {
	args   string
	status int
	// runs is why a command is not run without servers.
	runs string
}{
	"audit":               {status: exitUnknown},
	"doctor":              {status: exitUnknown},
	"reconcile":           {"--yes", exitUnknown, ""},
	"top":                 {"--once", exitUnknown, ""},
	"healthcheck":         {"--url=http://127.0.0.1:1", exitUnknown, ""},
	"migrate status":      {status: exitUnknown},
	"sale list":           {status: exitUnknown},
	"sale show":           {"SALE", exitUnknown, ""},
	"sale history":        {"SALE", exitUnknown, ""},
	"order show":          {"SALE", exitUnknown, ""},
	"order list":          {"--user=ann", exitUnknown, ""},
	"order export":        {status: exitUnknown},
	"payment list":        {status: exitUnknown},
	"payment show":        {"x", exitUnknown, ""},
	"dlq list":            {status: exitUnknown},
	"dlq show":            {"1", exitUnknown, ""},
	"relay list":          {status: exitUnknown},
	"draw status":         {"SALE", exitUnknown, ""},
	"draw create":         {"SALE --entries=SALE", exitFailed, ""},
	"draw beacon":         {"SALE --round=1 --signature=00", exitFailed, ""},
	"draw open":           {"SALE --yes", exitFailed, ""},
	"draw reveal":         {"SALE --party=x --secret=00", exitFailed, ""},
	"draw restore":        {"SALE --frozen=DIR/none", exitFailed, ""},
	"draw verify":         {"--bundle=DIR/none --leaves=DIR/none", exitUnknown, ""},
	"migrate up":          {status: exitFailed},
	"migrate down":        {status: exitFailed},
	"sale create":         {"--name=x --stock=1", exitFailed, ""},
	"sale pause":          {"SALE", exitFailed, ""},
	"sale resume":         {"SALE", exitFailed, ""},
	"sale end":            {"SALE --yes", exitFailed, ""},
	"sale restock":        {"SALE 1", exitFailed, ""},
	"sale rename":         {"SALE x", exitFailed, ""},
	"sale archive":        {"SALE --dir=DIR", exitFailed, ""},
	"order cancel":        {"SALE --reason=r --yes", exitFailed, ""},
	"payment refunded":    {"x y", exitFailed, ""},
	"payment dismissed":   {"x y", exitFailed, ""},
	"payment import":      {"-", exitFailed, ""},
	"rebuild":             {"--yes", exitFailed, ""},
	"projections rebuild": {status: exitFailed},
	"dlq replay":          {"1", exitFailed, ""},
	"dlq discard":         {"1 --reason=r --yes", exitFailed, ""},
	"relay add":           {"x stdout", exitFailed, ""},
	"relay pause":         {"x", exitFailed, ""},
	"relay resume":        {"x", exitFailed, ""},
	"relay replay":        {"x --from=start", exitFailed, ""},
	"relay remove":        {"x --yes", exitFailed, ""},
	"load":                {"--url=http://127.0.0.1:1 --sale=SALE", exitFailed, ""},
	"demo":                {status: exitFailed},
	"completion":          {"bash", exitOK, ""},
	"dashboard":           {runs: "it starts, and shows that neither answers"},
	"version":             {status: exitOK},
	"dev":                 {runs: "it waits for Redis, and has a test of its own"},
	"serve":               {runs: "it starts, and sells when Redis answers"},
	"work":                {runs: "it starts, and works when both answer"},
	"relay run":           {runs: "it starts, and sends when Postgres answers"},
}

func TestEachCommandHasExitStatusWithoutServers(t *testing.T) {
	t.Parallel()
	all := map[string]bool{}
	for _, leaf := range leaves(t) {
		all[strings.Join(words(leaf), " ")] = true
	}
	for command := range deadEnds {
		assert.True(t, all[command], "there is no command %s", command)
	}
	replace := strings.NewReplacer("SALE", uuid.NewString(), "DIR", filepath.ToSlash(t.TempDir()))
	for command := range all {
		want, known := deadEnds[command]
		if !assert.True(t, known, "%s is missing in deadEnds", command) || want.runs != "" {
			continue
		}
		t.Run(command, func(t *testing.T) {
			t.Parallel()
			args := append(strings.Fields(command), strings.Fields(replace.Replace(want.args))...)
			c := testkit.Command(t, args...)
			c.Setenv("REDIS_URL", "redis://127.0.0.1:1")
			c.Setenv("DATABASE_URL", "postgres://127.0.0.1:1/none?connect_timeout=2")
			c.Start()
			assert.Equal(t, want.status, c.Wait(within).ExitCode())
			output := c.Output()
			if want.status == exitUnknown {
				assert.Regexp(t, `refused|answers|not checked`, output)
			}
			if strings.Contains(output, "failed to connect") {
				assert.Contains(t, output, "set DATABASE_URL to the right one")
				assert.Equal(t, 1, strings.Count(output, "dial error"), output)
			}
		})
	}
}

// A wrong flag, a wrong format and a value too many are usage errors of each command, before it does anything.
func TestEachCommandRejectsWrongUsage(t *testing.T) {
	t.Setenv("REDIS_URL", "redis://127.0.0.1:1")
	t.Setenv("DATABASE_URL", "postgres://127.0.0.1:1/none")
	replace := strings.NewReplacer("SALE", uuid.NewString(), "DIR", t.TempDir())
	for _, leaf := range leaves(t) {
		command := strings.Join(words(leaf), " ")
		args := append(strings.Fields(command), strings.Fields(replace.Replace(deadEnds[command].args))...)
		for _, wrong := range []string{"--no-such-flag", "--log-level=loud", "--output=yaml", "one-too-many more"} {
			if strings.HasPrefix(wrong, "--output") && withoutOutput[command] != "" {
				wrong = "--output=json"
			}
			var out, errs bytes.Buffer
			status := run(append(args[:len(args):len(args)], strings.Fields(wrong)...), &out, &errs)
			require.Equal(t, exitUsage, status, "%s %s: %s", command, wrong, errs.String())
			assert.Empty(t, out.String())
			assert.Regexp(t, `^stampede: (unknown flag --|--\w+: |--[a-z-]+ must be one of|unexpected argument)`, errs.String(),
				"%s %s", command, wrong)
		}
	}
}

func TestHelpListsExitStatuses(t *testing.T) {
	t.Parallel()
	var out, errs bytes.Buffer
	require.Equal(t, exitOK, run([]string{"--help"}, &out, &errs))
	assert.Contains(t, strings.Join(strings.Fields(out.String()), " "), exitStatuses)
}

var update = flag.Bool("update", false, "write docs/reference.md and docs/metrics.md")

func TestDocumentationMatchesTheCode(t *testing.T) {
	t.Parallel()
	program := newParser(new(cli)).Model
	var listed []string
	for _, k := range problems.Kinds() {
		listed = append(listed, fmt.Sprintf("%d `%s`: %s", k.Status, k.Slug, k.Title))
	}
	text, err := docs.Reference("../..", program, listed)
	require.NoError(t, err)
	requirePage(t, docs.ReferencePage, text)
	found, err := docs.Check("../..", program)
	require.NoError(t, err)
	for _, difference := range found {
		assert.Fail(t, difference)
	}
}

// requirePage compares a page of docs with what the code gives, or writes it.
func requirePage(t *testing.T, name, want string) {
	t.Helper()
	name = "../../docs/" + name
	if *update {
		require.NoError(t, os.WriteFile(name, []byte(want), 0o644))
	}
	text, err := os.ReadFile(name)
	require.NoError(t, err)
	require.Equal(t, want, string(text), "the code gives another page: run `task docs`")
}
