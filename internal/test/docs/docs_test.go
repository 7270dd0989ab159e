package docs_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/docs"
)

// testCLI is a command line with subcommands.
type testCLI struct {
	Dead struct {
		List struct {
			Sale  string `required:"" help:"Its sale."`
			Limit int    `default:"1" help:"Most letters (${default})."`
			Spare bool   `hidden:""`
		} `cmd:"" help:"All."`
		Show struct {
			Sale string `required:"" help:"Its sale."`
			ID   string `arg:""`
		} `cmd:"" help:"One."`
	} `cmd:""`
}

// valid is a repository whose pages agree with its code. Each case below replaces a page.
var valid = map[string]string{
	"Taskfile.yml": "version: \"3\"\n\ntasks:\n  test:\n    cmd: x\n  test:race:\n    cmd: x\n  docs:\n    cmd: x\n",
	"shop/metrics.go": "package shop\n\nvar total = counter(\"stampede_total\", \"All.\")\n\nconst field = " +
		"\"stampede_field\"\n",
	"shop/shop.go": "package shop\n\ntype Shop struct{}\n\nfunc (s *Shop) Sell() {}\n",
	"shop/log.go": `package shop

func log(ctx context.Context, l *slog.Logger, fields []any) {
	l.Info("sold", "order", 1, slog.Int("units", 2))
	l.With("order", 1).WarnContext(ctx, "late", append(fields, "took", 3)...)
	fields = []any{"order", 1}
	args := []any{"xadd", 1}
	args = append(args, "block", 2)
	rdb.Info(ctx, "memory", "server")
	l.Error(err.Error())
}
`,
	"shop/shop_test.go": "package shop_test\n\nfunc TestSells() {}\n\nvar _ = os.Getenv(\"STAMPEDE_TEST_ONLY\")\n",
	"docs/metrics.md":   "# Metrics\n\n- `stampede_total`: All.\n",
	"docs/http-api.md":  "# API\n\n## Problems: all\n",
}

func TestCheckFindsContradictions(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ page, want string }{
		"plain text":                   {"Plain text.\n", ""},
		"line too long":                {strings.Repeat("ä", 101) + "\n", "README.md:1: 101 columns, want at most 100"},
		"line of maximum length":       {strings.Repeat("ä", 100) + "\n", ""},
		"most lines of the front page": {strings.Repeat("x\n", 125), ""},
		"too long front page":          {strings.Repeat("x\n", 126), "README.md:1: 126 lines, want at most 125"},
		"long line of a written page": {
			docs.Written + "\n" + strings.Repeat("x", 101) + "\n",
			"README.md:2: 101 columns, want at most 100",
		},
		"long URL":            {"See https://example.org/" + strings.Repeat("x", 100) + "\n", ""},
		"long line of output": {"```console\n" + strings.Repeat("x", 160) + "\n```\n", ""},
		"too long line of output": {
			"```console\n" + strings.Repeat("x", 161) + "\n```\n",
			"README.md:2: 161 columns, want at most 160",
		},
		"long command": {
			"```sh\n" + strings.Repeat("x", 101) + "\n```\n",
			"README.md:2: 101 columns, want at most 100",
		},
		"long table":           {"| " + strings.Repeat("x", 99) + "\n", "README.md:1: 101 columns, want at most 100"},
		"long generated table": {"<!-- figures: written by the benchmark -->\n| " + strings.Repeat("x", 158) + "\n", ""},
		"too long generated table": {
			"<!-- figures: written by the benchmark -->\n| " + strings.Repeat("x", 159) + "\n",
			"README.md:2: 161 columns, want at most 160",
		},
		"long generated chart": {
			"<!-- figures: written by the benchmark -->\n<!-- " + strings.Repeat("x", 96) + "\n",
			"README.md:2: 101 columns, want at most 100",
		},
		"valid links": {
			"[API](docs/http-api.md#problems-all), [shop](shop), [site](https://example.org)\n",
			"",
		},
		"broken link":  {"\n[API](docs/api.md)\n", "README.md:2: docs/api.md does not exist"},
		"broken image": {"<img src=\"plot.svg\">\n", "README.md:1: plot.svg does not exist"},
		"broken anchor": {
			"[API](docs/http-api.md#slugs)\n",
			"README.md:1: docs/http-api.md#slugs: no heading has this anchor",
		},
		"broken anchor on the same page": {"# A `b` c\n[a](#a-b-c) [b](#b)\n", "README.md:2: #b: no heading has this anchor"},
		"link in code":                   {"`[a](b)`\n", ""},
		"valid commands": {
			"`stampede dead list --limit=2`, `stampede dead list|show`, `stampede`, `stampede …`\n",
			"",
		},
		"unknown command":     {"`stampede live`\n", "README.md:1: stampede has no command live"},
		"unknown alternative": {"`stampede dead list|hide`\n", "README.md:1: stampede dead has no command hide"},
		"unknown subcommand": {
			"```sh\nA=1 go run ./cmd/stampede dead hide # x\n```\n",
			"README.md:2: stampede dead has no command hide",
		},
		"flag of another command": {
			"`stampede dead show\n--limit=1`\n",
			"README.md:1: stampede dead show has no flag --limit",
		},
		"flag on the next line": {
			"```console\n$ stampede dead list \\\n    --most=1\n--any\n```\n",
			"README.md:2: stampede dead list has no flag --most",
		},
		"valid flag":   {"`--limit`\n", ""},
		"unknown flag": {"`--most`\n", "README.md:1: no command has the flag --most"},
		"unknown variable": {
			"STAMPEDE_MOST, STAMPEDE_TEST_ONLY\n",
			"README.md:1: no code reads the environment variable STAMPEDE_MOST",
		},
		"valid task":                       {"`task test:race -- -run X ./shop`\n", ""},
		"unknown task":                     {"`task tset`\n", "README.md:1: there is no task tset"},
		"field with the prefix of metrics": {"`stampede_field`\n", ""},
		"unknown metric":                   {"`stampede_most`\n", "README.md:1: there is no metric stampede_most"},
		"valid paths":                      {"`shop`, `shop/*.go`, `metrics.go`, `docs/`, `text/plain`, `1/2`\n", ""},
		"unknown path":                     {"`shop/buyer`\n", "README.md:1: shop/buyer does not exist"},
		"unknown source file": {
			"`buyer.go`, `till/till.go`\n",
			"README.md:1: buyer.go does not exist\nREADME.md:1: till/till.go does not exist",
		},
		"valid Go names":  {"`shop.Shop`, `shop.Shop.Sell`, `TestSells`, `http.Server`\n", ""},
		"unknown Go name": {"`shop.Buyer`\n", "README.md:1: package shop declares no Buyer"},
		"valid function":  {"`shop/shop.go`: `Sell`, `shop/log.go`: `log`\n", ""},
		"function of another file": {
			"| sells | `shop/shop.go`: `log` |\n",
			"README.md:1: shop/shop.go has no function log",
		},
		"unknown test": {"`TestBuys`\n", "README.md:1: there is no test TestBuys"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			assert.Equal(t, test.want, strings.Join(check(t, map[string]string{"README.md": test.page}), "\n"))
		})
	}
}

func TestCheckFindsMissingMetric(t *testing.T) {
	t.Parallel()
	require.Equal(t, []string{"docs/metrics.md:1: the metric stampede_total is missing"},
		check(t, map[string]string{"docs/metrics.md": "None.\n"}))
}

func TestReferenceListsWhatTheCodeHas(t *testing.T) {
	t.Parallel()
	text, err := docs.Reference(write(t, valid), program(t), []string{"409 `sold-out`: Sold out"})
	require.NoError(t, err)
	_, text, _ = strings.Cut(text, " and `relay run`.\n")
	require.Equal(t, `
- `+"`stampede dead list`"+`: All.
  - `+"`STAMPEDE_LIMIT`"+`: Most letters (1).
- `+"`stampede dead show <id>`"+`: One.

Of several commands:

- `+"`STAMPEDE_SALE`"+`: Required. Its sale. (`+"`dead list`, `dead show`"+`)

## Problems

Each is a page of every ingress: `+"`/problems/SLUG`"+`.

- 409 `+"`sold-out`"+`: Sold out.

## Fields of the log

- `+"`order`"+`
- `+"`took`"+`
- `+"`units`"+`
`, text)
}

func TestItemsAreWrapped(t *testing.T) {
	t.Parallel()
	line := strings.Repeat("x", 95)
	for name, test := range map[string]struct{ text, want string }{
		"short":                     {"a `b c` d", "  - a `b c` d\n"},
		"of full width":             {line + " y", "  - " + line + "\n    y\n"},
		"code with spaces":          {line[:90] + " (`a b c d`, e)", "  - " + line[:90] + "\n    (`a b c d`, e)\n"},
		"word that begins a list":   {line[:90] + " of; - y", "  - " + line[:90] + " of; -\n    y\n"},
		"number that begins a list": {line[:90] + " most 1. y", "  - " + line[:90] + "\n    most 1. y\n"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			assert.Equal(t, test.want, docs.Item("  ", test.text))
		})
	}
}

func check(t *testing.T, pages map[string]string) []string {
	t.Helper()
	found, err := docs.Check(write(t, valid, pages), program(t))
	require.NoError(t, err)
	return found
}

// write returns a folder with these files.
func write(t *testing.T, all ...map[string]string) (root string) {
	t.Helper()
	root = t.TempDir()
	for _, files := range all {
		for name, text := range files {
			at := filepath.Join(root, filepath.FromSlash(name))
			require.NoError(t, os.MkdirAll(filepath.Dir(at), 0o755))
			require.NoError(t, os.WriteFile(at, []byte(text), 0o644))
		}
	}
	return root
}

func program(t *testing.T) *kong.Application {
	t.Helper()
	parser, err := kong.New(new(testCLI), kong.Name("stampede"), kong.DefaultEnvars("STAMPEDE"))
	require.NoError(t, err)
	return parser.Model
}
