// Package docs has the pages of the documentation, for the dashboard: an operator reads the runbook where they are.
package docs

import "embed"

// Pages are the pages of this folder, in Markdown.
//
//go:embed *.md
var Pages embed.FS
