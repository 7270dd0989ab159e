package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

const deployed = "../../deploy"

// rule is an alert of deploy/prometheus/alerts.yml.
type rule struct {
	Alert, Expr, For string
	Labels           map[string]string
}

func alerts(t *testing.T) (rules []rule) {
	t.Helper()
	text, err := os.ReadFile(deployed + "/prometheus/alerts.yml")
	require.NoError(t, err)
	var file struct{ Groups []struct{ Rules []rule } }
	require.NoError(t, yaml.Unmarshal(text, &file))
	for _, group := range file.Groups {
		rules = append(rules, group.Rules...)
	}
	require.NotEmpty(t, rules)
	return rules
}

// panel is a panel of a dashboard.
type panel struct {
	ID          int
	Type, Title string
	Datasource  struct{ UID string }
	FieldConfig struct{ Defaults struct{ Unit string } }
	Targets     []struct{ Expr string }
}

func dashboards(t *testing.T) map[string][]panel {
	t.Helper()
	paths, err := filepath.Glob(deployed + "/grafana/*.json")
	require.NoError(t, err)
	require.Len(t, paths, 2)
	boards := map[string][]panel{}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		var board struct {
			UID, Title string
			Panels     []panel
		}
		require.NoError(t, json.Unmarshal(text, &board), path)
		require.NotEmpty(t, board.UID)
		boards[board.Title] = board.Panels
	}
	return boards
}

func TestPanelsAreComplete(t *testing.T) {
	t.Parallel()
	for title, panels := range dashboards(t) {
		ids := map[int]bool{}
		for _, p := range panels {
			assert.False(t, ids[p.ID], "%s: two panels have the id %d", title, p.ID)
			ids[p.ID] = true
			if p.Type == "row" {
				continue
			}
			assert.NotEmpty(t, p.Targets, "%s: %s", title, p.Title)
			assert.NotEmpty(t, p.FieldConfig.Defaults.Unit, "%s: %s", title, p.Title)
			assert.Equal(t, "${datasource}", p.Datasource.UID, "%s: %s", title, p.Title)
		}
	}
}
