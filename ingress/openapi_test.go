package ingress

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"path"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/apiclient"
	"stampede/internal/ratelimit"
	"stampede/ledger/problems"
	"stampede/reservation"
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

// Each route is an operation of the document and each operation a route. Both say the same of who may make the call,
// whether it is a stream, and how it is refused before it is served. HEAD stands beside GET and is not in the document.
func TestRoutesAreTheOperationsOfTheDocument(t *testing.T) {
	t.Parallel()
	_, stripe := withStripe(t, stripeSecret)
	var routes, operations []string
	for _, r := range openShop(t, stripe).server.router.routes {
		require.True(t, r.isOn, r.path)
		routes = append(routes, r.describe())
	}
	c := theContract()
	paths := c.at(c.root(), "paths")
	for path := range paths.members {
		for method := range c.at(paths, path).members {
			if method != "parameters" {
				operations = append(operations, strings.ToUpper(method)+" "+path+": "+c.describe(c.at(paths, path, method)))
			}
		}
	}
	for _, line := range routes {
		assert.True(t, slices.Contains(operations, line), "openapi.yaml has no operation like the route\n%s", line)
	}
	for _, line := range operations {
		assert.True(t, slices.Contains(routes, line), "there is no route like the operation of openapi.yaml\n%s", line)
	}
	assert.Equal(t, len(routes), len(operations))
}

// Each call of the client that commands with --server use is a call of the table.
func TestClientOfCommandsAsksRoutes(t *testing.T) {
	t.Parallel()
	_, stripe := withStripe(t, stripeSecret)
	routes := openShop(t, stripe).server.router.routes
	var asked atomic.Value
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Store(r.Method + " " + r.URL.Path)
		w.WriteHeader(http.StatusNotFound)
		_, _ = w.Write(problemSaleNotFound.body)
	}))
	t.Cleanup(server.Close)
	client, err := apiclient.New(server.URL, "token", "test")
	require.NoError(t, err)
	t.Cleanup(client.Close)
	calls := 0
	for method, call := range reflect.ValueOf(client).Methods() {
		if method.Type.NumIn() == 1 {
			continue // Close
		}
		args := make([]reflect.Value, method.Type.NumIn()-1)
		for i := range args {
			switch args[i] = reflect.Zero(method.Type.In(i + 1)); args[i].Interface().(type) {
			case string:
				args[i] = reflect.ValueOf("x")
			case uuid.UUID:
				args[i] = reflect.ValueOf(uuid.New())
			case reservation.Terms:
				args[i] = reflect.ValueOf(reservation.Terms{Name: "x", Stock: 1, PerOrderLimit: 1})
			}
		}
		args[0] = reflect.ValueOf(t.Context())
		asked.Store("")
		call.Call(args)
		assert.True(t, slices.ContainsFunc(routes, func(r route) bool {
			path := parameter.ReplaceAllString(r.method+" "+r.path, "[^/]+")
			return regexp.MustCompile("^" + path + "$").MatchString(asked.Load().(string))
		}), "%s asks %q, and there is no such route", method.Name, asked.Load())
		calls++
	}
	require.Greater(t, calls, 20)
}

// describe is the line of a route, as that of its operation has to be.
func (r *route) describe() string {
	refusals := []problems.Kind{problems.TooLarge, problems.Internal}
	add := func(when bool, kinds ...problems.Kind) {
		if when {
			refusals = append(refusals, kinds...)
		}
	}
	a := r.admission
	security := map[proof]string{
		buyer: "buyerToken, buyerHeader", buyerOrTicket: "buyerToken, buyerHeader, ticket", ticketIfAny: ", ticket",
	}[a.proof]
	add(security != "", problems.Unauthorized, problems.HeadTooLarge) // the tokens of buyers are other people's
	if a.proof == operatorsToken {
		security = "operatorToken as " + a.action.Lowest().String()
		add(true, problems.Unauthorized, problems.Forbidden)
	}
	add(a.limits != nil || a.refused != nil || a.byHandler, problems.RateLimited, problems.Overloaded)
	path := parameter.ReplaceAllString(r.path, "{$1}")
	return fmt.Sprintf("%s %s: security [%s], stream %t, %s", r.method, path, security,
		r.method == http.MethodGet && r.class == streaming, slugsOf(refusals))
}

// describe is the line of an operation, as that of its route has to be.
func (c *contract) describe(operation part) string {
	var security []string
	required, _ := operation.members["security"].([]any)
	for _, one := range required {
		scheme := ""
		for name, roles := range one.(map[string]any) {
			scheme = name
			for _, role := range roles.([]any) {
				scheme += " as " + text(role)
			}
		}
		security = append(security, scheme)
	}
	var refusals []problems.Kind
	responses := c.at(operation, "responses")
	for status := range responses.members {
		for _, name := range schemaNames(c.at(responses, status, "content", "application/problem+json")) {
			slug := c.slug(name)
			at := slices.IndexFunc(ofAdmission, func(k problems.Kind) bool { return k.Slug == slug })
			if at >= 0 {
				refusals = append(refusals, ofAdmission[at])
			}
		}
	}
	isStream := c.at(responses, "200", "content", "text/event-stream").members != nil
	return fmt.Sprintf("security [%s], stream %t, %s", strings.Join(security, ", "), isStream, slugsOf(refusals))
}

// ofAdmission are the problems that follow from what a route says.
var ofAdmission = []problems.Kind{
	problems.TooLarge, problems.HeadTooLarge, problems.Internal, problems.Unauthorized, problems.Forbidden,
	problems.RateLimited, problems.Overloaded,
}

func slugsOf(kinds []problems.Kind) string {
	var slugs []string
	for _, k := range kinds {
		slugs = append(slugs, k.Slug)
	}
	slices.Sort(slugs)
	return strings.Join(slugs, " ")
}

// slug returns the slug of a problem by the name of its schema; empty for that of something else.
func (c *contract) slug(name string) string {
	kind := c.at(c.root(), "components", "schemas", name, "properties", "type").members["const"]
	slug, isProblem := strings.CutPrefix(text(kind), "/problems/")
	if !isProblem {
		return ""
	}
	return slug
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
		if slug := c.slug(name); slug != "" {
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
