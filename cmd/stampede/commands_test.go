package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/docs"
	"stampede/internal/test/testkit"
	"stampede/ledger/problems"
)

func TestHelpListsEachFlagWithVariable(t *testing.T) {
	t.Parallel()
	parser := newParser(&cli{})
	leaves := parser.Model.Leaves(false)
	require.Greater(t, len(leaves), 15)
	for _, leaf := range leaves {
		groups := leaf.AllFlags(true) // not in the subtests: kong writes to nodes that commands share
		t.Run(leaf.Path(), func(t *testing.T) {
			t.Parallel()
			var out, errs strings.Builder
			require.Equal(t, exitOK, run(append(words(leaf), "--help"), &out, &errs), errs.String())
			var missing []string
			for _, group := range groups {
				for _, flag := range group {
					if flag.Name == "help" || flag.Name == "version" {
						continue // they are no settings
					}
					require.NotEmpty(t, flag.Envs, flag.Name)
					if !strings.Contains(out.String(), "--"+flag.Name) || !strings.Contains(out.String(), "$"+flag.Envs[0]) {
						missing = append(missing, flag.Name)
					}
				}
			}
			assert.Empty(t, missing, out.String())
		})
	}
}

// words returns the fixed parts of a command's path, without its arguments.
func words(leaf *kong.Node) []string {
	return slices.DeleteFunc(strings.Fields(leaf.Path()), func(word string) bool { return strings.HasPrefix(word, "<") })
}

// The names of the variables are a contract.
func TestSettingsKeepTheirNames(t *testing.T) {
	t.Parallel()
	parser := newParser(&cli{})
	got := make(map[string]map[string]bool)
	for _, leaf := range parser.Model.Leaves(false) {
		names := make(map[string]bool)
		for _, group := range leaf.AllFlags(false) {
			for _, flag := range group {
				for _, env := range flag.Envs {
					names[env] = true
				}
			}
		}
		got[strings.Join(words(leaf), " ")] = names
	}
	for command, variables := range map[string][]string{
		"serve": {
			"REDIS_URL", "DATABASE_URL", "STAMPEDE_HTTP_ADDR", "STAMPEDE_PARTITIONS", "STAMPEDE_AUTH", "STAMPEDE_AUTH_HEADER",
			"STAMPEDE_JWT_SECRET", "STAMPEDE_JWKS_URL", "STAMPEDE_JWT_ISSUER", "STAMPEDE_JWT_AUDIENCE", "STAMPEDE_ADMIN_TOKEN",
			"STAMPEDE_LOG_LEVEL", "STAMPEDE_LOG_FORMAT", "STAMPEDE_TRUSTED_PROXIES", "STAMPEDE_USER_RATE", "STAMPEDE_USER_BURST",
			"STAMPEDE_ADDRESS_RATE", "STAMPEDE_ADDRESS_BURST", "STAMPEDE_USER_STREAMS", "STAMPEDE_ADDRESS_STREAMS",
			"STAMPEDE_PLAIN_READER", "STAMPEDE_CORS_ORIGINS", "STAMPEDE_OPERATORS_FILE",
		},
		"sale pause": {"STAMPEDE_OPERATOR"}, "dlq discard": {"STAMPEDE_OPERATOR"}, "order cancel": {"STAMPEDE_OPERATOR"},
		"audit":       {"STAMPEDE_OPERATOR"},
		"work":        {"REDIS_URL", "DATABASE_URL", "STAMPEDE_METRICS_ADDR", "STAMPEDE_CONSUMER", "STAMPEDE_PARTITIONS"},
		"healthcheck": {"STAMPEDE_HEALTHCHECK_URL"},
		"dev": {
			"REDIS_URL", "DATABASE_URL", "STAMPEDE_HTTP_ADDR", "STAMPEDE_ADMIN_TOKEN", "STAMPEDE_AUTH", "STAMPEDE_JWT_SECRET",
			"STAMPEDE_CORS_ORIGINS",
		},
	} {
		for _, name := range variables {
			assert.True(t, got[command][name], "%s: %s", command, name)
		}
	}
}

func TestUsageErrorsExitWithTwo(t *testing.T) {
	t.Parallel()
	for name, args := range map[string][]string{
		"unknown command": {"sell"},
		"unknown flag":    {"version", "--loudly"},
		"invalid sale id": {
			"sale", "show", "not-a-uuid", "--redis-url=redis://localhost",
			"--database-url=postgres://localhost",
		},
		"too many partitions": {
			"serve", "--partitions=65", "--redis-url=redis://localhost",
			"--database-url=postgres://localhost",
		},
		"invalid time": {
			"sale", "create", "--name=x", "--stock=1", "--opens-at=soon", "--redis-url=redis://localhost",
			"--database-url=postgres://localhost",
		},
		"invalid redis url": {"serve", "--redis-url=localhost:6379", "--database-url=postgres://localhost"},
		"jwt without key":   {"serve", "--redis-url=redis://localhost", "--database-url=postgres://localhost"},
		"short secret": {
			"serve", "--jwt-secret=short", "--redis-url=redis://localhost",
			"--database-url=postgres://localhost",
		},
		"load without buyers":        {"load", "--sale=" + uuid.NewString(), "--buyers=0"},
		"load without sale or token": {"load", "--admin-token="},
		"demo below minimum":         {"demo", "--stock=5"},
		"no number to restock":       {"sale", "restock", uuid.NewString(), "-5x"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out, errs strings.Builder
			assert.Equal(t, exitUsage, run(args, &out, &errs))
			assert.Empty(t, out.String())
			assert.True(t, strings.HasPrefix(errs.String(), "stampede: "), errs.String())
		})
	}
}

// Libraries replace zero by a default, so an invalid zero must be rejected.
func TestInvalidValueNamesFlag(t *testing.T) {
	t.Parallel()
	for _, args := range []string{
		"serve --max-in-flight=0", "serve --max-in-flight=-1", "serve --stop-delay=-1s", "serve --drain-timeout=0s",
		"serve --auth-header=", "serve --partitions=0",
		"serve --user-burst=0", "serve --address-burst=1000001", "serve --user-streams=-1", "dev --address-streams=-1",
		"dev --user-burst=0",
		"work --batch-max=0", "work --batch-max=-1", "work --min-idle=0s", "work --max-deliveries=0",
		"work --drain-timeout=0s",
		"work --partitions=65", "sale list --partitions=0",
		"dev --max-in-flight=0", "dev --batch-max=0", "dev --auth-header=", "dev --partitions=0",
		"load --buyers=0", "load --double-clicks=2", "load --stock=0", "load --quantity=0", "load --connections=0",
		"load --patience=0s", "load --rate=0", "load --auth-header=", "load --partitions=0",
		"demo --double-clicks=NaN", "demo --over=-1s", "demo --buyers=20000001",
	} {
		t.Run(args, func(t *testing.T) {
			t.Parallel()
			command, value, _ := strings.Cut(args, " --")
			flag, _, _ := strings.Cut(value, "=")
			status, errs := runRejected(t, append(strings.Fields(command), "--"+value)...)
			assert.Equal(t, exitUsage, status)
			assert.Contains(t, errs, "--"+flag+" is ")
			assert.Contains(t, errs, ", want ")
		})
	}
}

func TestUsageErrorsNameMissingArguments(t *testing.T) {
	t.Parallel()
	for want, args := range map[string][]string{
		"--name=STRING (or STAMPEDE_SALE_NAME)": {"sale", "create", "--stock=1"},
		"needs --database-url (DATABASE_URL)": {
			"load", "--sale=" + uuid.NewString(),
			"--redis-url=redis://localhost", "--database-url=",
		},
		`--user-rate: want a rate like 5/s, 30/m or 100/h, or 0 for none; got "5"`: {"serve", "--user-rate=5"},
		`--address-rate: want a rate between one a day and 10000/s; got "1e9/s"`:   {"serve", "--address-rate=1e9/s"},
		`--trusted-proxies: "10.0.0.0/33" is neither an address nor a prefix`: {
			"serve",
			"--trusted-proxies=10.0.0.0/8,10.0.0.0/33",
		},
		"--cors-origins: \"https://*.shop.example\" is not an origin as browsers send it: list each host": {
			"serve", "--cors-origins=https://*.shop.example",
		},
		"give one of --over, --rate and --arrive": {"load", "--over=1s", "--rate=5"},
		"--arrive=flash:fast: want a time":        {"load", "--admin-token=x", "--arrive=flash:fast"},
		"--arrive: want flash:TIME or a file":     {"load", "--admin-token=x", "--arrive=even"},
		`"p98=1s": want one of durable, failed,`:  {"load", "--admin-token=x", "--want=p98=1s"},
		"(or STAMPEDE_SERVER) instead":            {"sale", "restock", uuid.NewString(), "-5"},
		"reason must be 1 to 500 characters":      {"dlq", "discard", "1", "--reason", " "},
		"or --admin-token (STAMPEDE_ADMIN_TOKEN)": {"load"},
	} {
		status, errs := runRejected(t, args...)
		assert.Equal(t, exitUsage, status, args)
		assert.Contains(t, errs, want)
	}
}

// runRejected runs a command that is expected to be rejected, in its own process: if it were accepted, it would run
// forever.
func runRejected(t *testing.T, args ...string) (status int, output string) {
	t.Helper()
	c := testkit.Command(t, args...)
	c.Start()
	return c.Wait(within).ExitCode(), c.Output()
}

func TestSaleCommands(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	type shown struct {
		ID               uuid.UUID
		State            string
		Stock, Available int64
		OpensAt          time.Time `json:"opens_at"`
	}
	sale := func(args ...string) (sale shown) {
		t.Helper()
		output := s.ends(exitOK, append([]string{"sale"}, append(args, "--output=json")...)...)
		require.NoError(t, json.Unmarshal([]byte(output), &sale), output)
		return sale
	}
	closes := "--closes-at=" + time.Now().Add(2*time.Hour).UTC().Format(time.RFC3339)
	opens := "--opens-at=" + time.Now().Add(time.Hour).UTC().Format(time.RFC3339)
	create := []string{"create", "--name=autumn", "--per-order-limit=2", opens, closes, "--idempotency-key=autumn"}
	created := sale(append(create, "--stock=10")...)
	assert.Equal(t, created, sale(append(create, "--stock=10")...), "same idempotency key")
	assert.Contains(t, s.ends(exitFailed, append([]string{"sale"}, append(create, "--stock=11")...)...),
		"idempotency key was used for another")
	assert.EqualValues(t, "scheduled", created.State)
	assert.WithinDuration(t, time.Now().Add(time.Hour), created.OpensAt, time.Minute)
	id := created.ID.String()
	assert.EqualValues(t, "paused", sale("pause", id).State)
	assert.EqualValues(t, "scheduled", sale("resume", id).State)
	assert.EqualValues(t, 15, sale("restock", id, "5", "--idempotency-key=delivery").Available)
	assert.EqualValues(t, 15, sale("restock", id, "5", "--idempotency-key=delivery").Available, "same idempotency key")
	assert.EqualValues(t, "ended", sale("end", id).State)
	assert.EqualValues(t, 15, sale("show", id).Stock)

	output := s.ends(exitOK, "sale", "list")
	assert.Contains(t, output, "autumn")
	output = s.ends(exitFailed, "sale", "resume", id)
	assert.Contains(t, output, "cannot resume a sale that is ended")
	output = s.ends(exitFailed, "sale", "show", uuid.NewString())
	assert.Contains(t, output, "sale not found")
	output = s.ends(exitUsage, "sale", "create", "--name=x", "--stock=0")
	assert.Contains(t, output, "stock must be a whole number")
}

func TestParseMoment(t *testing.T) {
	t.Parallel()
	var m moment
	require.NoError(t, m.UnmarshalText([]byte("2026-11-27T09:00:00+01:00")))
	assert.Equal(t, time.Date(2026, 11, 27, 8, 0, 0, 0, time.UTC), m.UTC())
	require.NoError(t, m.UnmarshalText([]byte("+90s")))
	assert.WithinDuration(t, time.Now().Add(90*time.Second), m.Time, 10*time.Second)
	require.NoError(t, m.UnmarshalText([]byte("-90s")))
	assert.WithinDuration(t, time.Now().Add(-90*time.Second), m.Time, 10*time.Second)
	require.NoError(t, m.UnmarshalText([]byte("2026-11-27")))
	assert.Equal(t, time.Date(2026, 11, 27, 0, 0, 0, 0, time.UTC), m.UTC())
	for _, wrong := range []string{"", "tomorrow", "+", "+5", "+-5m", "5m", "2026-11", "0001-01-01"} {
		assert.Error(t, m.UnmarshalText([]byte(wrong)), wrong)
	}
}

// Each command is in the file with its name, or with others of its kind.
func TestEachCommandHasAFile(t *testing.T) {
	t.Parallel()
	beside := map[string]string{
		"Demo": "dev", "Work": "serve", "Healthcheck": "serve", "Top": "dashboard",
		"Reconcile": "audit", "Rebuild": "audit", "Projections": "audit", "Doctor": "audit",
		"Complete": "arguments", "Completion": "arguments", "Version": "main",
	}
	fields := reflect.VisibleFields(reflect.TypeFor[cli]())
	for _, f := range fields {
		if _, isCommand := f.Tag.Lookup("cmd"); !isCommand {
			continue
		}
		source, err := os.ReadFile(cmp.Or(beside[f.Name], strings.ToLower(f.Name)) + ".go")
		require.NoError(t, err)
		assert.Contains(t, string(source), "type "+f.Type.Name()+" struct")
	}
}

func TestSaleItemOnCommandLine(t *testing.T) {
	t.Parallel()
	var i saleItem
	require.NoError(t, i.UnmarshalText([]byte("m:100:12900")))
	require.Equal(t, saleItem{Code: "m", Name: "m", Stock: 100, UnitPrice: 12900}, i)
	require.NoError(t, new(saleItem).UnmarshalText([]byte("m:-5")))
	for _, wrong := range []string{"", "m", "m:", "m:x", "m:1:2:3", "m:1.5", "m:1:"} {
		require.Error(t, new(saleItem).UnmarshalText([]byte(wrong)), wrong)
	}
}

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
