package ingress

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"mime"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/labstack/echo/v4"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/require"
)

// holdToContract compares every answer of the server with openapi.yaml, however a test asks for it. It stands behind
// the connection: what is written is compared, and not what a test reads of it.
//
// kin-openapi validates the document (TestDocumentIsValid). It compiles the schema again for each answer, so the
// answers are validated by the library beneath it, with each schema compiled once.
func holdToContract(t testing.TB, s *Server) {
	t.Helper()
	c := theContract()
	s.router.echo.Pre(func(next echo.HandlerFunc) echo.HandlerFunc {
		return func(ctx echo.Context) error {
			written := &writtenAnswer{ResponseWriter: ctx.Response().Writer}
			ctx.Response().Writer = written
			if err := next(ctx); err != nil {
				ctx.Error(err)
			}
			c.hold(t, ctx.Request(), written.status, written.header, written.body.Bytes())
			return nil
		}
	})
	purchase := s.router.servePurchase
	s.router.servePurchase = func(ctx echo.Context) error {
		err := purchase(ctx)
		if plain, ok := ctx.Response().Writer.(interface{ Body() []byte }); ok {
			c.hold(t, ctx.Request(), ctx.Response().Status, ctx.Response().Header(), plain.Body())
		}
		return err
	}
}

// writtenAnswer remembers what a handler writes.
type writtenAnswer struct {
	http.ResponseWriter
	status int
	header http.Header
	body   bytes.Buffer
}

func (w *writtenAnswer) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *writtenAnswer) WriteHeader(status int) {
	w.status, w.header = status, w.Header().Clone()
	w.ResponseWriter.WriteHeader(status)
}

func (w *writtenAnswer) Write(body []byte) (int, error) {
	w.body.Write(body)
	return w.ResponseWriter.Write(body)
}

// contract is openapi.yaml, ready to validate answers.
type contract struct {
	document map[string]any

	mu       sync.Mutex
	compiler *jsonschema.Compiler
	schemas  map[string]*jsonschema.Schema
}

const documentURL = "openapi.json"

var theContract = sync.OnceValue(func() *contract {
	site, err := documents()
	if err != nil {
		panic(err)
	}
	document, err := jsonschema.UnmarshalJSON(bytes.NewReader(site.JSON.Body))
	if err != nil {
		panic(err)
	}
	compiler := jsonschema.NewCompiler()
	compiler.DefaultDraft(jsonschema.Draft2020)
	compiler.AssertFormat()
	if err := compiler.AddResource(documentURL, document); err != nil {
		panic(err)
	}
	return &contract{
		document: document.(map[string]any), compiler: compiler, schemas: make(map[string]*jsonschema.Schema),
	}
})

// part is an object of the document, and where it is.
type part struct {
	pointer string
	members map[string]any
}

// at returns a part below this one, with references followed. Its members are nil if there is none.
func (c *contract) at(from part, names ...string) part {
	for _, name := range names {
		from.pointer += "/" + strings.NewReplacer("~", "~0", "/", "~1").Replace(name)
		from.members, _ = from.members[name].(map[string]any)
		if ref, ok := from.members["$ref"].(string); ok {
			from = c.at(part{members: c.document}, strings.Split(strings.TrimPrefix(ref, "#/"), "/")...)
		}
	}
	return from
}

func (c *contract) root() part { return part{members: c.document} }

// validate validates a value by the schema at a part.
func (c *contract) validate(schema part, value any) error {
	if schema.members == nil {
		return errors.New("the document has no schema for it")
	}
	c.mu.Lock()
	compiled := c.schemas[schema.pointer]
	if compiled == nil {
		var err error
		if compiled, err = c.compiler.Compile(documentURL + "#" + schema.pointer); err != nil {
			c.mu.Unlock()
			return err
		}
		c.schemas[schema.pointer] = compiled
	}
	c.mu.Unlock()
	return compiled.Validate(value)
}

// findPath returns the path of the document that a request has, and its item.
func (c *contract) findPath(requested string) (item part, found bool) {
	paths := c.at(c.root(), "paths")
	if paths.members[requested] != nil {
		return c.at(paths, requested), true
	}
	for _, path := range slices.Sorted(maps.Keys(paths.members)) {
		want, have := strings.Split(path, "/"), strings.Split(requested, "/")
		if len(want) == len(have) && !slices.ContainsFunc(want, func(segment string) bool {
			i := slices.Index(want, segment)
			return have[i] != segment && (have[i] == "" || !strings.HasPrefix(segment, "{"))
		}) {
			return c.at(paths, path), true
		}
	}
	return part{}, false
}

// withSlot reports an answer that the document does not describe.
func (c *contract) hold(t testing.TB, r *http.Request, status int, header http.Header, body []byte) {
	t.Helper()
	if strings.HasPrefix(r.URL.Path, "/panics") || status == 0 {
		return // a route of a test, or no answer because the client has left
	}
	if err := c.check(r, status, header, body); err != nil {
		t.Errorf("openapi.yaml does not describe this answer to %s %s:\n%v\n%d %v\n%q",
			r.Method, r.URL.RequestURI(), err, status, header, body[:min(len(body), 1000)])
	}
}

func (c *contract) check(r *http.Request, status int, header http.Header, body []byte) error {
	item, found := c.findPath(r.URL.EscapedPath())
	method := strings.ToLower(r.Method)
	if r.Method != strings.ToUpper(r.Method) {
		method = "" // methods are case-sensitive
	}
	if method == "head" && item.members["get"] != nil && status != http.StatusMethodNotAllowed {
		method = "get"
	}
	switch operation := c.at(item, method); {
	case !found || strings.Contains(r.URL.EscapedPath(), "//"):
		return c.checkRouter(status, header, body, http.StatusNotFound, "NotFound")
	case method == "options":
		if status != http.StatusNoContent || header.Get("Allow") == "" {
			return errors.New("want 204 with Allow")
		}
		return nil
	case operation.members == nil, method == "head":
		return c.checkRouter(status, header, body, http.StatusMethodNotAllowed, "MethodNotAllowed")
	default:
		return c.checkAnswer(c.at(operation, "responses", strconv.Itoa(status)), status, header, body)
	}
}

// checkRouter checks an answer to a path or a method that the document does not have.
func (c *contract) checkRouter(status int, header http.Header, body []byte, want int, schema string) error {
	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(body))
	switch {
	case err != nil:
		return err
	case status != want:
		return fmt.Errorf("want %d, or a path in the document", want)
	case (header.Get("Allow") != "") != (want == http.StatusMethodNotAllowed):
		return errors.New("Allow is for 405")
	}
	return c.validate(c.at(c.root(), "components", "schemas", schema), value)
}

// unlisted are headers that the document does not list: they say nothing about the call, or HTTP itself describes them.
var unlisted = []string{
	"Connection", "Content-Type", "Content-Length", "Content-Encoding", "Vary",
	"Access-Control-Allow-Origin", "Access-Control-Expose-Headers",
}

func (c *contract) checkAnswer(response part, status int, header http.Header, body []byte) error {
	if response.members == nil {
		return errors.New("the operation has no such status")
	}
	headers := c.at(response, "headers")
	for name := range headers.members {
		if err := c.checkHeader(c.at(headers, name), header[http.CanonicalHeaderKey(name)]); err != nil {
			return fmt.Errorf("header %s: %w", name, err)
		}
	}
	for name, values := range header {
		listed := slices.Contains(unlisted, name)
		for documented := range headers.members {
			listed = listed || http.CanonicalHeaderKey(documented) == name
		}
		// A problem is never cached.
		listed = listed || status >= http.StatusBadRequest && name == "Cache-Control" && values[0] == "no-store"
		if !listed {
			return fmt.Errorf("the header %s is not in the document", name)
		}
	}
	content := c.at(response, "content")
	if content.members == nil {
		if len(body) > 0 || header.Get("Content-Type") != "" {
			return errors.New("the document has no body for it")
		}
		return nil
	}
	return c.checkBody(content, header.Get("Content-Type"), body)
}

func (c *contract) checkHeader(header part, values []string) error {
	switch {
	case len(values) > 1:
		return errors.New("is sent twice")
	case len(values) == 0 && header.members["required"] == true:
		return errors.New("is missing")
	case len(values) == 0:
		return nil
	}
	schema := c.at(header, "schema")
	if schema.members["type"] != "integer" {
		return c.validate(schema, values[0])
	}
	number, err := strconv.Atoi(values[0])
	if err != nil {
		return err
	}
	return c.validate(schema, number)
}

func (c *contract) checkBody(content part, contentType string, body []byte) error {
	media := c.at(content, contentType)
	if media.members == nil {
		name, _, err := mime.ParseMediaType(contentType)
		if media = c.at(content, name); err != nil || media.members == nil {
			return fmt.Errorf("the media type %q is not in the document", contentType)
		}
	}
	switch {
	case strings.HasSuffix(contentType, "json"):
		value, err := jsonschema.UnmarshalJSON(bytes.NewReader(body))
		if err != nil {
			return err
		}
		return c.validate(c.at(media, "schema"), value)
	case contentType == "text/event-stream":
		return c.checkEvents(c.at(media, "schema"), body)
	}
	return nil
}

// checkEvents validates the events of a stream. The last one may have been cut off.
func (c *contract) checkEvents(item part, stream []byte) error {
	events := strings.Split(string(stream), "\n\n")
	for _, text := range events[:len(events)-1] {
		event := map[string]any{}
		for line := range strings.SplitSeq(text, "\n") {
			if name, value, ok := strings.Cut(line, ": "); ok && name != "" && name != "retry" {
				event[name] = value
			}
		}
		if len(event) == 0 {
			continue // a comment
		}
		if err := c.validate(item, event); err != nil {
			return fmt.Errorf("event %q: %w", text, err)
		}
		data, err := jsonschema.UnmarshalJSON(strings.NewReader(event["data"].(string)))
		if err == nil {
			err = c.validate(c.at(item, "properties", "data", "contentSchema"), data)
		}
		if err != nil {
			return fmt.Errorf("event %q: %w", text, err)
		}
	}
	return nil
}

// The contract itself must not let everything pass.
func TestContractFindsDeviations(t *testing.T) {
	t.Parallel()
	const order = "01a2027b-df09-7d85-9722-39259fcab250"
	path := "/v1/orders/" + order
	body := func(change ...string) string {
		text := `{"order_id":"` + order + `","sale_id":"01a2027b-de9c-7adf-b6e6-5b263e1fb250","user_id":"ann",` +
			`"quantity":1,"status":"confirmed","version":2,"reserved_at":"2026-11-22T09:00:02.187Z",` +
			`"updated_at":"2026-11-22T09:00:02.199Z"}`
		return strings.NewReplacer(change...).Replace(text)
	}
	problem := func(slug string, status int) string {
		return fmt.Sprintf(`{"type":"/problems/%s","title":"The order does not exist","status":%d,"detail":"x"}`, slug, status)
	}
	fine := http.Header{"Content-Type": jsonContent, "Cache-Control": noStore}
	for name, test := range map[string]struct {
		method, path string
		status       int
		header       http.Header
		body, want   string
	}{
		"fine":              {"GET", path, 200, fine, body(), ""},
		"undocumented path": {"GET", "/v1/nothing", 200, fine, body(), "want 404"},
		"undocumented call": {"PUT", path, 200, fine, body(), "want 405"},
		"status":            {"GET", path, 418, fine, body(), "no such status"},
		"member":            {"GET", path, 200, fine, body(`"version"`, `"new":1,"version"`), "new"},
		"missing member":    {"GET", path, 200, fine, body(`"user_id":"ann",`, ""), "user_id"},
		"time":              {"GET", path, 200, fine, body(".187Z", "Z"), "reserved_at"},
		"reason of no need": {"GET", path, 200, fine, body(`"version"`, `"reason":"x","version"`), "reason"},
		"missing header": {
			"GET", path, 200, http.Header{"Content-Type": jsonContent}, body(), "Cache-Control: is missing",
		},
		"undocumented media": {
			"GET", path, 200, http.Header{"Content-Type": {"text/plain"}, "Cache-Control": noStore}, "x", "text/plain",
		},
		"undocumented header": {
			"GET", path, 200,
			http.Header{"Content-Type": jsonContent, "Cache-Control": noStore, "X-Secret": {"1"}},
			body(),
			"X-Secret",
		},
		"problem": {"GET", path, 404, http.Header{"Content-Type": problemContent}, problem("order-not-found", 404), ""},
		"problem of another call": {
			"GET", path, 404, http.Header{"Content-Type": problemContent}, problem("sale-not-found", 404), "order-not-found",
		},
		"problem with another status": {
			"GET", path, 404, http.Header{"Content-Type": problemContent}, problem("order-not-found", 400), "status",
		},
	} {
		r, err := http.NewRequestWithContext(t.Context(), test.method, test.path, nil)
		require.NoError(t, err)
		err = theContract().check(r, test.status, test.header, []byte(test.body))
		if test.want == "" {
			require.NoError(t, err, name)
		} else {
			require.ErrorContains(t, err, test.want, name)
		}
	}
}
