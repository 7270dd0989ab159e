package fleet

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

const deployed = "../../deploy/prometheus"

// rule is an alert of deploy/prometheus/alerts.yml.
type rule struct {
	Alert, Expr         string
	Hold                string `yaml:"keep_firing_for"`
	Labels, Annotations map[string]string
}

func alertRules(t *testing.T) []rule {
	t.Helper()
	var file struct{ Groups []struct{ Rules []rule } }
	readYAML(t, "/alerts.yml", &file)
	require.Len(t, file.Groups, 1)
	return file.Groups[0].Rules
}

func readYAML(t *testing.T, name string, to any) {
	t.Helper()
	text, err := os.ReadFile(deployed + name)
	require.NoError(t, err)
	require.NoError(t, yaml.Unmarshal(text, to))
}

// The pages, the alerts, their inhibitions and the runbook name the same troubles, in the same words.
func TestTroublesAreThoseOfAlertsAndRunbook(t *testing.T) {
	t.Parallel()
	var shown, alerts, sections, headings []string
	for _, k := range kinds {
		shown = append(shown, fmt.Sprintf("%s, %s: %s", k.name, k.severity, k.summary))
		sections = append(sections, k.runbook())
	}
	for _, r := range alertRules(t) {
		alerts = append(alerts, fmt.Sprintf("%s, %s: %s", r.Alert, r.Labels["severity"], r.Annotations["summary"]))
		anchor := (&kind{name: r.Alert}).runbook()
		require.Equal(t, `{{ or $externalLabels.runbook "docs/runbook.md" }}#`+anchor, r.Annotations["runbook_url"])
		require.NotEmpty(t, r.Annotations["description"], r.Alert)
		if strings.Contains(r.Expr, "increase(") {
			require.Contains(t, r.Expr, fmt.Sprintf("[%.0fm]", holdEnds.Minutes()), "the page shows it as long")
		}
	}
	require.ElementsMatch(t, shown, alerts)

	runbook, err := os.ReadFile("../../docs/runbook.md")
	require.NoError(t, err)
	withAlerts, _, _ := strings.Cut(string(runbook), "\n## Without an alert\n")
	for line := range strings.Lines(withAlerts) {
		if heading, ok := strings.CutPrefix(line, "## "); ok {
			headings = append(headings, strings.ReplaceAll(strings.ToLower(strings.TrimSpace(heading)), " ", "-"))
		}
	}
	slices.Sort(sections)
	require.ElementsMatch(t, slices.Compact(sections), headings)
}

func TestInhibitionsAreTheCauses(t *testing.T) {
	t.Parallel()
	// Only the outage of a whole server explains others, and not that ingresses are gone: the labels tell.
	whole := map[*kind]string{postgresGone: ` instance=""`, redisGone: ` node="" stream=""`}
	held := map[string]time.Duration{}
	for _, r := range alertRules(t) {
		held[r.Alert+" "+r.Labels["severity"]], _ = time.ParseDuration(r.Hold) // none is 0
	}
	wanted := map[string][]string{}
	explains := func(cause *kind, of *kind, target string) {
		require.Equal(t, Critical, cause.severity, "%s hides no worse trouble", cause.name)
		source := fmt.Sprintf("alertname=%q severity=%q%s", cause.name, cause.severity, whole[cause])
		wanted[source] = append(wanted[source], target)
		// A consequence is not sent when its cause ends: it lasts, and what counts over a minute lasts for that.
		longer := held[cause.name+" critical"] - held[fmt.Sprintf("%s %s", of.name, of.severity)]
		require.GreaterOrEqual(t, longer, 90*time.Second, "%s because of %s", of.name, cause.name)
	}
	for _, k := range kinds {
		for _, cause := range k.causes {
			explains(cause, k, k.name)
		}
	}
	for reason, causes := range rebuiltAfter {
		for _, cause := range causes {
			explains(cause, stockRebuilt, stockRebuilt.name+` reason="`+reason+`"`)
		}
	}
	for _, part := range []string{"ingress", "worker", "relay"} {
		for _, cause := range (&Process{Kind: part}).missedAs() {
			explains(cause, targetGone, targetGone.name+` process="`+part+`"`)
		}
	}
	var file struct {
		Rules []struct {
			Source []string `yaml:"source_matchers"`
			Target []string `yaml:"target_matchers"`
		} `yaml:"inhibit_rules"`
	}
	readYAML(t, "/alertmanager.yml", &file)
	found := map[string][]string{}
	for _, r := range file.Rules {
		names, ok := strings.CutPrefix(r.Target[0], `alertname=~"`)
		require.True(t, ok)
		targets := strings.Split(strings.TrimSuffix(names, `"`), "|")
		if slices.Contains(targets, noIngress.name) {
			require.Equal(t, []string{`process=""`}, r.Target[1:])
		} else if len(r.Target) > 1 {
			targets = []string{strings.Join(append(targets, r.Target[1:]...), " ")}
		}
		source := strings.Join(r.Source, " ")
		found[source] = append(found[source], targets...)
	}
	require.Equal(t, wanted, found)
}
