package ingress

import (
	"fmt"
	"maps"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/reservation/problems"
)

func TestDocumentIsValid(t *testing.T) {
	t.Parallel()
	doc, err := openapi3.NewLoader().LoadFromData(openapi)
	require.NoError(t, err)
	require.NoError(t, doc.Validate(t.Context(), openapi3.EnableExamplesValidation()))
	// The examples of schemas are what the pages show.
	c := theContract()
	schemas := c.at(c.root(), "components", "schemas")
	for name := range schemas.members {
		schema := c.at(schemas, name)
		examples, _ := schema.members["examples"].([]any)
		for _, example := range examples {
			require.NoError(t, c.validate(schema, example), name)
		}
	}
}

// HEAD stands beside GET, and is not in the document.
func TestRoutesAreThePathsOfTheDocument(t *testing.T) {
	t.Parallel()
	_, stripe := withStripe(t, stripeSecret)
	s := openShop(t, stripe)
	var routes, documented []string
	for _, r := range s.server.router.echo.Routes() {
		segments := strings.Split(r.Path, "/")
		for i, segment := range segments {
			if name, ok := strings.CutPrefix(segment, ":"); ok {
				segments[i] = "{" + name + "}"
			}
		}
		if r.Method != http.MethodHead {
			routes = append(routes, r.Method+" "+strings.Join(segments, "/"))
		}
	}
	c := theContract()
	paths := c.at(c.root(), "paths")
	for route := range paths.members {
		for member := range c.at(paths, route).members {
			if member != "parameters" {
				documented = append(documented, strings.ToUpper(member)+" "+route)
			}
		}
	}
	slices.Sort(routes)
	slices.Sort(documented)
	require.Equal(t, routes, documented)
}

// The contract holds each answer to the headers of the document. Gateways must neither buffer nor compress a stream,
// nor compress what has ranges.
func TestDocumentKeepsGatewaysFromHoldingBack(t *testing.T) {
	t.Parallel()
	c := theContract()
	paths := c.at(c.root(), "paths")
	streams, files := 0, 0
	for path := range paths.members {
		answers := c.at(paths, path, "get", "responses")
		for status := range answers.members {
			headers := c.at(answers, status, "headers")
			caching := text(c.at(headers, "Cache-Control", "schema").members["const"])
			if c.at(answers, status, "content", "text/event-stream").members != nil {
				streams++
				require.Equal(t, []string{"no-store, no-transform", "no"},
					[]string{caching, text(c.at(headers, "X-Accel-Buffering", "schema").members["const"])}, path)
			}
			if headers.members["Accept-Ranges"] != nil {
				files++
				require.Contains(t, caching, "no-transform", path)
			}
		}
	}
	require.NotZero(t, streams)
	require.NotZero(t, files)
}

// Each problem is in the enumeration of all, has a schema with the title and status of the code and a page, and can be
// the answer of an operation (or of the router).
func TestEachProblemIsDescribed(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	c := theContract()
	schemas := c.at(c.root(), "components", "schemas")
	described := map[string]problems.Kind{}
	names := map[string]string{}
	for name := range schemas.members {
		properties := c.at(schemas, name, "properties")
		if slug, ok := strings.CutPrefix(text(c.at(properties, "type").members["const"]), "/problems/"); ok {
			status, err := strconv.Atoi(text(c.at(properties, "status").members["const"]))
			require.NoError(t, err, name)
			described[slug] = problems.Kind{Status: status, Slug: slug, Title: text(c.at(properties, "title").members["const"])}
			names[slug] = name
		}
	}
	code := map[string]problems.Kind{}
	for _, k := range problems.Kinds() {
		code[k.Slug] = k
	}
	require.Equal(t, code, described)

	var listed []string
	for _, slug := range c.at(schemas, "Problem", "properties", "type").members["enum"].([]any) {
		listed = append(listed, path.Base(slug.(string)))
	}
	require.ElementsMatch(t, slices.Collect(maps.Keys(code)), listed)

	answers := map[string]bool{"MethodNotAllowed": true}
	paths := c.at(c.root(), "paths")
	for route := range paths.members {
		for method := range c.at(paths, route).members {
			responses := c.at(paths, route, method, "responses")
			for status := range responses.members {
				for _, name := range schemaNames(c.at(responses, status, "content", "application/problem+json")) {
					answers[name] = true
				}
			}
		}
	}
	for slug, name := range names {
		assert.True(t, answers[name], "no operation is answered %s", slug)
		page := s.get("/problems/" + slug)
		assert.Equal(t, http.StatusOK, page.status, slug)
		for _, part := range []string{"<h1>", "What happened", "Whether anything was done", "What to do", "Example", slug} {
			assert.Contains(t, page.body, part)
		}
	}
	index := s.get("/problems").body
	for slug := range names {
		assert.Contains(t, index, `"/problems/`+slug+`"`)
	}
}

// text returns a scalar of the document as text.
func text(scalar any) string { return fmt.Sprint(scalar) }

// schemaNames returns the names of the schemas that a content may have.
func schemaNames(content part) (names []string) {
	schema, _ := content.members["schema"].(map[string]any)
	alternatives, _ := schema["oneOf"].([]any)
	for _, one := range append(alternatives, schema) {
		if ref, ok := one.(map[string]any)["$ref"].(string); ok {
			names = append(names, path.Base(ref))
		}
	}
	return names
}
