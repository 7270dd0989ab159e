package apidoc_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/ingress/apidoc"
)

func TestBrokenDocumentIsRefused(t *testing.T) {
	t.Parallel()
	const page = "components: {schemas: {X: {properties: {type: {const: /problems/x}, status: {const: STATUS}}, " +
		"examples: EXAMPLES}}}"
	with := func(status, examples string) string {
		return strings.NewReplacer("STATUS", status, "EXAMPLES", examples).Replace(page)
	}
	for name, source := range map[string]string{
		"empty":      "",
		"not YAML":   "a: [",
		"no example": with("409", "[]"),
		"no status":  with("soon", "[{}]"),
		"no target":  with("409", "[{$ref: '#/components/schemas/Y'}]"),
	} {
		_, err := apidoc.New([]byte(source))
		require.Error(t, err, name)
	}
	// Circles end, and what they name is shown without members.
	for _, source := range []string{
		with("409", "[{a: 1}]"),
		"components: {schemas: {X: {$ref: '#/components/schemas/X'}, Y: {properties: {y: {$ref: '#/components/schemas/Y'}}}}}",
	} {
		_, err := apidoc.New([]byte(source))
		require.NoError(t, err, source)
	}
}

// Descriptions are Markdown, and everything else is text.
func TestPagesEscapeDocument(t *testing.T) {
	t.Parallel()
	site, err := apidoc.New([]byte(`
info: {title: "<b>A</b>", version: "1", description: "**bold** <script>alert(1)</script> [x](javascript:alert(1))"}
tags: [{name: "<i>T</i>"}]
paths:
  /a/{id}:
    get: {operationId: a, tags: ["<i>T</i>"], summary: "<u>S</u>", responses: {"200": {description: "*fine*"}}}
`))
	require.NoError(t, err)
	page := string(site.Docs.Body)
	for _, wanted := range []string{
		"<strong>bold</strong>", "&lt;b&gt;A&lt;/b&gt;", "&lt;u&gt;S&lt;/u&gt;", "<em>fine</em>",
	} {
		require.Contains(t, page, wanted)
	}
	for _, banned := range []string{"<script", "javascript:", "<b>", "<i>", "<u>"} {
		require.NotContains(t, page, banned)
	}
}
