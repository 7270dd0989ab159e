package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/relay/target"
	"stampede/reservation"
	"stampede/reservation/catalog"
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
