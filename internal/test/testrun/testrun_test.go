package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// module has a passing package, a failing one, one that does not compile, and one without tests.
var module = map[string]string{
	"go.mod":       "module example\n\ngo 1.26.0\n",
	"bare/bare.go": "package bare\n",
	"good/good_test.go": `package good

import "testing"

func TestGood(t *testing.T) { t.Log("log of the passing package") }
`,
	"bad/bad_test.go": `package bad

import "testing"

func TestPasses(t *testing.T) { t.Parallel(); t.Log("log of another test") }

func TestFails(t *testing.T) {
	t.Parallel()
	t.Log("log of the parent")
	t.Run("passes", func(t *testing.T) { t.Log("log of another case") })
	t.Run("fails", func(t *testing.T) { t.Error("this case is wrong") })
}
`,
	"broken/broken_test.go": "package broken\n\nvar x int = \"text\"\n",
}

func runIn(t *testing.T, files map[string]string, args ...string) (passed bool, text string) {
	t.Helper()
	folder := t.TempDir()
	for name, source := range files {
		require.NoError(t, os.MkdirAll(filepath.Join(folder, filepath.Dir(name)), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(folder, name), []byte(source), 0o644))
	}
	t.Chdir(folder)
	var out strings.Builder
	passed, err := run(t.Context(), args, &out)
	require.NoError(t, err)
	return passed, out.String()
}

func TestRunPrintsOnlyLogsOfFailedTests(t *testing.T) {
	passed, text := runIn(t, module, "./...")
	assert.False(t, passed)
	assert.Regexp(t, `(?m)^\d/3  0:\d\d  ok (\(cached\) )?example/good  \d`, text)
	assert.Regexp(t, `(?m)^\d/3  0:\d\d  FAIL example/bad  \d`, text)
	assert.Regexp(t, `(?m)^\d/3  0:\d\d  FAIL example/broken  \d`, text)
	assert.Contains(t, text, "this case is wrong")
	assert.Contains(t, text, "log of the parent")
	assert.Contains(t, text, `cannot use "text"`)
	assert.NotContains(t, text, "log of another")
	assert.NotContains(t, text, "log of the passing package")
	assert.NotContains(t, text, "example/bare")
	assert.Contains(t, text, "\n  example/bad TestFails\n")
	assert.Contains(t, text, "\n  example/broken\n")
}

func TestRunIgnoresValueOfBenchFlag(t *testing.T) {
	passed, text := runIn(t, map[string]string{
		"go.mod":            "module example\n\ngo 1.26.0\n",
		"good/good_test.go": module["good/good_test.go"],
	}, "-bench", ".", "-benchtime", "1x", "./...")
	assert.True(t, passed)
	assert.Regexp(t, `(?m)^1/1  0:\d\d  ok (\(cached\) )?example/good  \d`, text)
}

func TestRunPrintsPanic(t *testing.T) {
	passed, text := runIn(t, map[string]string{
		"go.mod": "module example\n\ngo 1.26.0\n",
		"bad/bad_test.go": `package bad

import "testing"

func TestPanics(t *testing.T) { t.Log("log of the test"); panic("out of order") }
`,
	}, "./...")
	assert.False(t, passed)
	assert.Contains(t, text, "log of the test")
	assert.Contains(t, text, "panic: out of order")
	assert.Contains(t, text, "\n  example/bad TestPanics\n")
}

func TestRunPassesFlagsToGoTest(t *testing.T) {
	passed, text := runIn(t, map[string]string{
		"inner/go.mod": module["go.mod"], "inner/bad/bad_test.go": module["bad/bad_test.go"],
	}, "-C", "inner", "-run", "Passes", "-count", "1", "./bad")
	assert.True(t, passed, text)
	assert.Regexp(t, `^1/1  0:\d\d  ok example/bad  \d+\.\d s\n$`, text)
}

func TestReportPrintsRunningPackages(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	r := newReport(&out, 12)
	for _, line := range []string{
		`{"Action":"start","Package":"a"}`, `{"Action":"start","Package":"b"}`,
		`{"Action":"run","Package":"b","Test":"T"}`, `{"Action":"pass","Package":"b","Test":"T","Elapsed":1}`,
	} {
		r.line([]byte(line + "\n"))
	}
	r.printRunning(r.printed.Add(29*time.Second), quietMax)
	assert.Empty(t, out.String())
	r.printRunning(r.printed.Add(30*time.Second), quietMax)
	assert.Equal(t, "       0:00  running: a (0 tests done), b (1 tests done)\n", out.String())
}

func TestReportPrintsSkippedPartsOfPassedTests(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	require.NoError(t, newReport(&out, 1).read(strings.NewReader(
		`{"Action":"output","Package":"a","Test":"T","Output":"NOT COMPARED: no Java\n"}`+"\n"+
			`{"Action":"pass","Package":"a","Test":"T","Elapsed":0}`+"\n"), time.Minute))
	assert.Equal(t, "NOT COMPARED: no Java\n", out.String())
}

func TestReportNamesCachedPackages(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	require.NoError(t, newReport(&out, 1).read(strings.NewReader(
		`{"Action":"output","Package":"a","Output":"ok  \ta\t(cached)\n"}`+"\n"+`{"Action":"pass","Package":"a","Elapsed":0}`+
			"\n"), time.Minute))
	assert.Equal(t, "1/1  0:00  ok (cached) a  0.0 s\n", out.String())
}

func TestTestsKeepTemporaryFilesWhereThereIsRoom(t *testing.T) {
	wanted := t.TempDir()
	t.Setenv("TMPDIR", wanted)
	_, text := runIn(t, map[string]string{"go.mod": module["go.mod"], "good/good_test.go": `package good

import (
	"os"
	"testing"
)

func TestShow(t *testing.T) { t.Error("files are kept in", os.TempDir()) }
`}, "./...")
	assert.Contains(t, text, "files are kept in "+wanted+"\n")

	t.Setenv("TMPDIR", "")
	if folder := temporaryFolder(); folder != os.TempDir() {
		made, err := os.MkdirTemp(folder, "testrun-")
		require.NoError(t, err)
		require.NoError(t, os.Remove(made))
	}
}
