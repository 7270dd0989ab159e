package lua_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// header is the first comment of a script.
type header struct {
	keys, args []string
	answers    []string // the words that the script can answer; none for a script that returns data
	hasAnswers bool
	body       string // the script without its comments
}

var (
	item    = regexp.MustCompile(`^  (\d+)  (\S+)`)
	outcome = regexp.MustCompile(`^  ([a-z][a-z-]*)( <\w+>)?  `)
	literal = regexp.MustCompile(`\b(KEYS|ARGV)\[(\d+)\]`)
	quoted  = regexp.MustCompile(`'([a-z][a-z-]*)[ %a-z]*'`)
)

func readHeader(t *testing.T, script string) header {
	t.Helper()
	source, err := os.ReadFile(script + ".lua")
	require.NoError(t, err)
	var h header
	var section string
	inHeader := true
	var body strings.Builder
	for line := range strings.Lines(string(source)) {
		line = strings.TrimRight(line, "\n")
		text, isComment := strings.CutPrefix(line, "--")
		if strings.HasPrefix(line, "#!") {
			continue
		}
		if !isComment {
			inHeader = false
			code, _, _ := strings.Cut(line, "-- ")
			body.WriteString(code + "\n")
			continue
		}
		if !inHeader {
			continue
		}
		text = strings.TrimPrefix(text, " ")
		switch trimmed := strings.TrimSpace(text); trimmed {
		case "KEYS", "ARGV", "Answers":
			section = trimmed
			h.hasAnswers = h.hasAnswers || trimmed == "Answers"
			continue
		}
		if m := item.FindStringSubmatch(text + "  "); m != nil && section != "Answers" {
			list := &h.keys
			if section == "ARGV" {
				list = &h.args
			}
			*list = append(*list, m[2])
			require.Equal(t, strconv.Itoa(len(*list)), m[1], "%s of %s is numbered from 1 without a gap", section, script)
		}
		// The pattern requires two blanks, also after an answer without a description.
		if m := outcome.FindStringSubmatch(text + "  "); m != nil && section == "Answers" {
			h.answers = append(h.answers, m[1])
		}
	}
	h.body = body.String()
	return h
}

func scripts(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("*.lua")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for i, f := range files {
		files[i] = strings.TrimSuffix(f, ".lua")
	}
	return files
}

func TestHeadersMatchScripts(t *testing.T) {
	for _, script := range scripts(t) {
		t.Run(script, func(t *testing.T) {
			t.Parallel()
			h := readHeader(t, script)
			require.NotEmpty(t, h.keys, "the header has no KEYS")
			require.True(t, h.hasAnswers, "the header has no Answers")

			for _, m := range literal.FindAllStringSubmatch(h.body, -1) {
				n, err := strconv.Atoi(m[2])
				require.NoError(t, err)
				list := h.keys
				if m[1] == "ARGV" {
					list = h.args
				}
				require.LessOrEqual(t, n, len(list), "%s is used but not in the header", m[0])
			}
			for i := range h.keys {
				loops := strings.Contains(h.body, "ipairs(KEYS)") || strings.Contains(h.body, "#KEYS do")
				used := strings.Contains(h.body, "KEYS["+strconv.Itoa(i+1)+"]")
				require.True(t, loops || used, "key %d is in the header but never used", i+1)
			}

			var inScript []string
			for _, m := range quoted.FindAllStringSubmatch(h.body, -1) {
				inScript = append(inScript, m[1])
			}
			for _, word := range h.answers {
				require.Contains(t, inScript, word, "the header lists an answer that the script cannot give")
			}
			require.Equal(t, len(h.answers), len(slices.Compact(slices.Sorted(slices.Values(h.answers)))),
				"an answer is listed twice")
		})
	}
}
