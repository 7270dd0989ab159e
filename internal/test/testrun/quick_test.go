package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Task test:quick lists tests by name. Each name must match a test, so that a renamed test does not drop out.
func TestQuickTestsExist(t *testing.T) {
	t.Parallel()
	const root = "../../.."
	taskfile, err := os.ReadFile(filepath.Join(root, "Taskfile.yml"))
	require.NoError(t, err)
	found := regexp.MustCompile(`(?s)QUICK_PACKAGES: >-\s+(.*?)\n  QUICK_RUN: >-\s+\^Test\((.*?)\)`).FindSubmatch(taskfile)
	require.NotNil(t, found)
	var tests strings.Builder
	declared := regexp.MustCompile(`(?m)^func Test\w+`)
	for _, pattern := range strings.Fields(string(found[1])) {
		folder := filepath.Join(root, strings.TrimSuffix(pattern, "/..."))
		require.NoError(t, filepath.WalkDir(folder, func(name string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(name, "_test.go") {
				return err
			}
			source, err := os.ReadFile(name)
			tests.WriteString(strings.Join(declared.FindAllString(string(source), -1), "\n") + "\n")
			return err
		}))
	}
	for name := range strings.SplitSeq(strings.Join(strings.Fields(string(found[2])), ""), "|") {
		assert.True(t, strings.Contains(tests.String(), "func Test"+name), "no test name begins with Test%s", name)
	}
}
