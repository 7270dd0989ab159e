package ingress

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/ratelimit"
)

func TestDocumentIsServed(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	written := s.get("/openapi.yaml")
	require.Equal(t, string(openapi), written.body)
	require.Equal(t, "application/yaml", written.header.Get("Content-Type"))
	var document map[string]any
	require.NoError(t, json.Unmarshal([]byte(s.get("/openapi.json").body), &document))
	require.Equal(t, "3.1.0", document["openapi"])
	require.Contains(t, document["paths"], "/v1/sales/{sale}/orders")
}

var (
	target     = regexp.MustCompile(`(?:href|src|action|srcset|data)="([^"]*)"`)
	styleSheet = regexp.MustCompile(`(?s)<style>(.*?)</style>`)
	anchor     = regexp.MustCompile(`id="([^"]*)"`)
)

// The pages need nothing else, run nothing, and their links lead somewhere.
func TestPagesStandAlone(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	docs := s.get("/docs").body
	anchors := map[string]bool{}
	for _, found := range anchor.FindAllStringSubmatch(docs, -1) {
		require.False(t, anchors[found[1]], "%s is there twice", found[1])
		anchors[found[1]] = true
	}
	linked := map[string]bool{}
	for _, path := range []string{"/docs", "/problems", "/problems/order-ended"} {
		page := s.get(path)
		for _, banned := range []string{"<script", "javascript:", "<iframe", "@import", "url(", "http://", "https://"} {
			require.NotContains(t, page.body, banned, path)
		}
		require.NotRegexp(t, `<[^>]* on[a-z]+=`, page.body)
		sheet := styleSheet.FindAllStringSubmatch(page.body, -1)
		require.Len(t, sheet, 1)
		sum := sha256.Sum256([]byte(sheet[0][1]))
		require.Equal(t, "default-src 'none'; style-src 'sha256-"+base64.StdEncoding.EncodeToString(sum[:])+
			"'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'", page.header.Get("Content-Security-Policy"))
		require.NotContains(t, page.body, ` style="`)
		for _, found := range target.FindAllStringSubmatch(page.body, -1) {
			linked[found[1]] = true
		}
	}
	for link := range linked {
		page, fragment, _ := strings.Cut(link, "#")
		if page != "" {
			assert.Equal(t, http.StatusOK, s.get(page).status, link)
		}
		if fragment != "" {
			assert.True(t, anchors[fragment], link)
		}
	}
	// Each operation and schema is on the page.
	c := theContract()
	schemas := c.at(c.root(), "components", "schemas")
	for name := range schemas.members {
		if !strings.Contains(text(c.at(schemas, name, "properties", "type").members["const"]), "/") {
			assert.True(t, anchors["schema-"+name] || name == "Problem", name)
		}
	}
	for path := range c.at(c.root(), "paths").members {
		assert.Contains(t, docs, `<span class="path">`+path+`</span>`)
	}
}

func TestPagesAreLimitedByAddress(t *testing.T) {
	t.Parallel()
	s := openShop(t, func(c *Config) { c.AddressLimit = Limit{Rate: ratelimit.Rate(0.001), Burst: 5} })
	for _, path := range []string{"/docs", "/problems", "/problems/sold-out", "/openapi.yaml", "/openapi.json"} {
		require.Equal(t, http.StatusOK, s.get(path).status)
	}
	s.get("/docs").isProblem(http.StatusTooManyRequests, "rate-limited")
}
