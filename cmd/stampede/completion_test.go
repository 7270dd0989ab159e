package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// inBash returns what bash proposes for the last word of a line, with the function that the script defines.
func inBash(t *testing.T, words ...string) []string {
	t.Helper()
	folder := t.TempDir()
	self, err := os.Executable()
	require.NoError(t, err)
	program := fmt.Sprintf("#!/bin/sh\nSTAMPEDE_TEST_REEXEC=1 exec %q \"$@\"\n", self)
	require.NoError(t, os.WriteFile(filepath.Join(folder, "stampede"), []byte(program), 0o700)) //nolint:gosec // is run
	const line = `source <(stampede completion bash)
		complete -p stampede >&2 || exit 1
		COMP_WORDS=(stampede "$@"); COMP_CWORD=$#
		compopt() { echo "compopt $*"; }
		_stampede stampede "${COMP_WORDS[COMP_CWORD]}"
		printf '%s\n' "${COMPREPLY[@]}"`
	args := append([]string{"--norc", "--noprofile", "-c", line, "bash"}, words...)
	bash := exec.CommandContext(t.Context(), "bash", args...)
	bash.Env = append(os.Environ(), "PATH="+folder+":"+os.Getenv("PATH"))
	var errs strings.Builder
	bash.Stderr = &errs
	out, err := bash.Output()
	require.NoError(t, err, errs.String())
	require.Contains(t, errs.String(), "complete -F _stampede stampede")
	return strings.Fields(strings.ReplaceAll(string(out), "compopt -o ", "compopt:"))
}

func TestBashCompletesCommandsFlagsAndValues(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]string{
		"sa":                                     "sale",
		"sale re":                                "resume restock rename",
		"sale nothing":                           "",
		"version ":                               "",
		"--log-level deb":                        "debug",
		"--log-level debug dl":                   "dlq",
		"audit --wai":                            "--wait",
		"audit --output ":                        "text json",
		"audit --output = j":                     "json", // as bash splits --output=j
		"audit --output =":                       "text json",
		"audit --output=j":                       "--output=json", // as zsh and fish do not
		"audit --sale x --outp":                  "--output",
		"audit --archive ":                       "compopt:default",
		"sale archive --dir ":                    "compopt:dirnames",
		"order export --to ":                     "compopt:default",
		"dlq list --status p":                    "parked",
		"completion ":                            "bash zsh fish",
		"completion bash ":                       "",
		"sale end --yes ":                        "",
		"sale end -y --idem":                     "",
		"rebuild --yes --part":                   "--partition --partitions",
		"serve --key-pre":                        "", // hidden
		"comple":                                 "completion",
		"sale create --name --stock --per-order": "--per-order-limit",
	} {
		t.Run(line, func(t *testing.T) {
			t.Parallel()
			words := strings.Split(line, " ")
			assert.ElementsMatch(t, strings.Fields(want), inBash(t, words...))
		})
	}
	// Every command that is not hidden is proposed.
	top := inBash(t, "")
	for _, leaf := range leaves(t) {
		assert.Contains(t, top, words(leaf)[0])
	}
}

func TestCompletionOfOtherShellsIsPrinted(t *testing.T) {
	t.Parallel()
	for shell, want := range map[string]string{"zsh": "#compdef stampede", "fish": "complete -c stampede"} {
		var out, errs strings.Builder
		require.Equal(t, exitOK, run([]string{"completion", shell}, &out, &errs), errs.String())
		assert.Contains(t, out.String(), want)
	}
	var out, errs strings.Builder
	assert.Equal(t, exitUsage, run([]string{"completion", "cmd.exe"}, &out, &errs))
	assert.Contains(t, errs.String(), "must be one of")
}
