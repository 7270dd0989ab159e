package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// withoutOutput are the commands that print no result, with the reason. All others take --output.
var withoutOutput = map[string]string{
	"dev":        "runs until it is stopped; prints addresses and commands to paste",
	"dashboard":  "runs until it is stopped",
	"serve":      "runs until it is stopped",
	"work":       "runs until it is stopped",
	"relay run":  "runs until it is stopped",
	"completion": "prints a script for a shell",
}

func TestEachCommandTakesOutput(t *testing.T) {
	t.Parallel()
	found := map[string]bool{}
	for _, leaf := range leaves(t) {
		command := strings.Join(words(leaf), " ")
		found[command] = true
		var output *kong.Flag
		for _, group := range leaf.AllFlags(false) {
			for _, flag := range group {
				assert.NotEqual(t, "json", flag.Name, command)
				if flag.Name == "output" {
					output = flag
				}
			}
		}
		if withoutOutput[command] != "" {
			assert.Nil(t, output, "%s has --output: remove it from the list", command)
			continue
		}
		if assert.NotNil(t, output, "%s has no --output: embed outputFlag, or say why not in withoutOutput", command) {
			assert.Equal(t, "text,json", output.Enum, command)
			assert.Equal(t, []string{"STAMPEDE_OUTPUT"}, output.Envs, command)
		}
	}
	for command := range withoutOutput {
		assert.True(t, found[command], "there is no command %s", command)
	}
}

// leaves are all commands of the program.
func leaves(t *testing.T) []*kong.Node {
	t.Helper()
	all := newParser(&cli{}).Model.Leaves(true)
	require.Greater(t, len(all), 25)
	return all
}

func objects(t *testing.T, text string) (all []map[string]any) {
	t.Helper()
	for line := range strings.Lines(text) {
		var object map[string]any
		require.NoError(t, json.Unmarshal([]byte(line), &object), text)
		all = append(all, object)
	}
	return all
}

func TestVersionAsJSON(t *testing.T) {
	t.Parallel()
	var out, text, errs strings.Builder
	require.Equal(t, exitOK, run([]string{"version", "--output=json"}, &out, &errs), errs.String())
	require.Equal(t, exitOK, run([]string{"version"}, &text, &errs), errs.String())
	assert.Equal(t, text.String(), "stampede "+objects(t, out.String())[0]["version"].(string)+"\n")
}
