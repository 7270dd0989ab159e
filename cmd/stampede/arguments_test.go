package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/relay/target"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

func TestWordsAreArranged(t *testing.T) {
	t.Parallel()
	root := newParser(&cli{}).Model.Node
	for given, want := range map[string]string{
		"":                                       "",
		"help":                                   "--help",
		"sale help":                              "sale --help",
		"help sale create":                       "sale create --help",
		"relay add help stdout":                  "relay add help stdout", // a name
		"--output json sale list":                "sale list --output=json",
		"--output=json sale --limit 5 list":      "sale list --output=json --limit=5",
		"--log-level debug sale list --limit -5": "sale list --log-level=debug --limit=-5",
		"--limit -5 sale list":                   "sale list --limit=-5",
		"--output json nonsense -5":              "nonsense -5 --output=json",
		"sale restock SALE -50":                  "sale restock SALE -- -50",
		"sale restock SALE -50 --server URL":     "sale restock SALE --server URL -- -50",
		"sale restock SALE -- -50":               "sale restock SALE -- -50",
		"sale restock --server=URL SALE -50":     "sale restock --server=URL SALE -- -50",
		"order export --since -1h --until=-1m":   "order export --since=-1h --until=-1m",
		"complete -- sale restock SALE -5":       "complete -- sale restock SALE -5",
	} {
		assert.Equal(t, want, strings.Join(arranged(root, strings.Fields(given)), " "), given)
	}
}

func TestEachAddressIsCheckedFirst(t *testing.T) {
	t.Setenv("REDIS_URL", "redis://127.0.0.1:1")
	t.Setenv("DATABASE_URL", "postgres://127.0.0.1:1/none")
	checked := 0
	for _, leaf := range leaves(t) {
		for _, group := range leaf.AllFlags(true) {
			for _, flag := range group {
				if flag.PlaceHolder != "HOST:PORT" {
					continue
				}
				checked++
				require.True(t, flag.Tag.Type == "addr" || flag.Name == "dashboard-addr", "%s --%s", leaf.Path(), flag.Name)
				for _, wrong := range []string{"foo", ":", "localhost:99999", "localhost:"} {
					var out, errs strings.Builder
					assert.Equal(t, exitUsage, run(append(words(leaf), "--"+flag.Name+"="+wrong), &out, &errs), errs.String())
					assert.Contains(t, errs.String(), "--"+flag.Name, leaf.Path())
					assert.Contains(t, errs.String(), "is not an address: want HOST:PORT")
				}
			}
		}
	}
	assert.Greater(t, checked, 6)
}

func TestEachWrongSettingNamesAnExample(t *testing.T) {
	checked := 0
	for _, leaf := range leaves(t) {
		for _, group := range leaf.AllFlags(true) {
			for _, flag := range group {
				switch flag.Target.Kind() {
				case reflect.Int, reflect.Int32, reflect.Int64, reflect.Uint, reflect.Float64:
				default:
					if flag.Target.Type() != reflect.TypeFor[time.Time]() {
						continue
					}
				}
				checked++
				var out, errs strings.Builder
				assert.Equal(t, exitUsage, run(append(words(leaf), "--"+flag.Name+"=wrong"), &out, &errs), errs.String())
				assert.Contains(t, errs.String(), "want", "%s --%s", leaf.Path(), flag.Name)
			}
		}
	}
	require.Greater(t, checked, 50)
}

func TestMisspelledVariablesAreNamed(t *testing.T) {
	t.Setenv("STAMPEDE_HTTP_ADRESS", "x")
	t.Setenv("STAMPEDE_COLOUR_OF_THE_PAGE", "x")
	t.Setenv("STAMPEDE_PARTITION", "")
	var out, errs strings.Builder
	require.Equal(t, exitOK, run([]string{"version"}, &out, &errs))
	assert.Contains(t, errs.String(), "variable STAMPEDE_HTTP_ADRESS: did you mean STAMPEDE_HTTP_ADDR?\n")
	assert.Contains(t, errs.String(), "no command reads the variable STAMPEDE_COLOUR_OF_THE_PAGE\n")
	assert.Equal(t, 2, strings.Count(errs.String(), "\n"), "an empty one is none")
	for _, other := range []string{"A", "B", "C", "D", "E"} {
		t.Setenv("STAMPEDE_X_"+other, "x")
	}
	errs.Reset()
	require.Equal(t, exitOK, run([]string{"version"}, &out, &errs))
	assert.Equal(t, strayMax, strings.Count(errs.String(), "\n"))
}

// What compose, the manifests and Kubernetes give a process is known.
func TestVariablesOfDeploymentsAreKnown(t *testing.T) {
	names := map[string]bool{
		"STAMPEDE_INGRESS_SERVICE_HOST": true, "STAMPEDE_INGRESS_SERVICE_PORT_HTTP": true,
		"STAMPEDE_INGRESS_PORT": true, "STAMPEDE_INGRESS_PORT_8080_TCP_ADDR": true,
	}
	variable := regexp.MustCompile(`\bSTAMPEDE_[A-Z_]*[A-Z]\b`)
	read := func(path string) {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		for _, name := range variable.FindAllString(string(text), -1) {
			names[name] = true
		}
	}
	for _, path := range []string{"../../compose.yaml", "../../compose.cluster.yaml", "../../Dockerfile"} {
		read(path)
	}
	require.NoError(t, filepath.WalkDir("../../deploy", func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.Type().IsRegular() {
			read(path)
		}
		return err
	}))
	require.Greater(t, len(names), 20)
	for name := range names {
		t.Setenv(name, "x")
	}
	var errs strings.Builder
	warnOfStrays(&errs, newParser(&cli{}).Model.Node)
	assert.Empty(t, errs.String())
}

func TestRelayListShowsErrorsOfNow(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	require.NoError(t, writeTargets(&out, []target.Standing{
		{Target: target.Target{Name: "well", LastError: "is over"}},
		{Target: target.Target{Name: "ill", LastError: "is now", Failures: 1}},
	}))
	assert.NotContains(t, out.String(), "is over")
	assert.Contains(t, out.String(), "is now")
}

func TestSaleShowsItsTerms(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	require.NoError(t, writeSale(&out, []catalog.CountedSale{{}}))
	for _, term := range []string{"per-order limit", "payment window", "shards", "opens", "closes", "created"} {
		assert.Contains(t, out.String(), term)
	}
	entries, terms := uuid.New(), reservation.Terms{Waitlist: true}
	for want, sale := range map[string]reservation.Sale{
		`drawn +among the entries in sale ` + entries.String(): {OffersOnly: true, EntriesID: entries},
		`orders +places in the waiting list`:                   {OffersOnly: true},
		`waiting +0`:                                           {EntriesID: entries, Terms: terms},
	} {
		out.Reset()
		require.NoError(t, writeSale(&out, []catalog.CountedSale{{Sale: sale}}))
		assert.Regexp(t, want, out.String())
	}
}

// An error about invalid input names what was typed: each flag of the API's members, and none of these.
func TestErrorsNameFlagsOfMembers(t *testing.T) {
	t.Parallel()
	parser := newParser(&cli{})
	for command, members := range map[string]map[string]string{
		"sale create --name=x": {
			"stock": "--stock", "items": "--item", "items[2].unit_price": "--item[2].unit_price", "name": "--name",
			"per_order_limit": "--per-order-limit", "opens_at": "--opens-at", "closes_at": "--closes-at",
			"payment_window_seconds": "--payment-window", "payment_grace_seconds": "--payment-grace",
			"payments_per_second": "--payments-per-second", "unit_price": "--unit-price", "currency": "--currency",
			"shards": "--shards", "waitlist": "--waitlist",
		},
		"draw create 01edb000-0000-7000-8000-000000000003 --entries=01edb000-0000-7000-8000-000000000002": {
			"entries_sale_id": "--entries", "freeze_seconds": "--freeze", "parties": "--party",
		},
		"sale restock 01edb000-0000-7000-8000-000000000003 5": {"items": "--item", "units": "units"},
	} {
		parsed, err := parser.Parse(strings.Fields(command))
		require.NoError(t, err, command)
		for member, flag := range members {
			invalid := &order.InvalidError{Field: member, Reason: "must be later than " + member}
			named := withFlags(parsed.Selected(), invalid)
			require.True(t, strings.HasPrefix(named.Error(), flag+" must be later than "), named)
			require.ErrorIs(t, named, invalid)
		}
		for _, flag := range parsed.Selected().Flags {
			if member := strings.ReplaceAll(flag.Name, "-", "_"); flag.Name != "help" {
				named := withFlags(parsed.Selected(), &order.InvalidError{Field: member, Reason: "must be given"})
				require.Equal(t, "--"+flag.Name+" must be given", named.Error())
			}
		}
	}
	other := errors.New("payment_window_seconds must stay")
	parsed, err := parser.Parse([]string{"sale", "create", "--name=x"})
	require.NoError(t, err)
	require.Equal(t, other, withFlags(parsed.Selected(), other))
}

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
