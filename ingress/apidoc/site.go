// Package apidoc makes everything that is served from the description of the API, openapi.yaml: its JSON, a page
// for people, and a page for each problem. All of it is made once, at the start; a request only copies bytes.
package apidoc

import (
	"cmp"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"strings"

	"github.com/go-json-experiment/json/jsontext"
	"go.yaml.in/yaml/v3"
)

// Page is an answer that never changes.
type Page struct {
	Body []byte
	// ETag names the bytes, in quotes.
	ETag        string
	ContentType string
}

// Site is everything that is served from a description. It must not be changed.
type Site struct {
	YAML, JSON     Page
	Docs, Problems Page
	// ProblemPages and ProblemJSON explain each problem, by slug.
	ProblemPages, ProblemJSON map[string]Page
	// ContentSecurityPolicy is the header for the pages: they load nothing, run nothing, and have one style sheet.
	ContentSecurityPolicy string
}

// Media types of the pages.
const (
	yamlType = "application/yaml"
	jsonType = "application/json"
	htmlType = "text/html; charset=utf-8"
)

var (
	//go:embed style.css
	style string
	//go:embed pages.html
	pages string
)

// New makes the site of a description.
func New(source []byte) (*Site, error) {
	doc, err := parse(source)
	if err != nil {
		return nil, fmt.Errorf("openapi.yaml: %w", err)
	}
	text, err := appendJSON(nil, doc.root)
	if err != nil {
		return nil, fmt.Errorf("openapi.yaml: %w", err)
	}
	sum := sha256.Sum256([]byte(style))
	site := &Site{
		YAML:         newPage(source, yamlType),
		JSON:         newPage(append(text, '\n'), jsonType),
		ProblemPages: map[string]Page{},
		ProblemJSON:  map[string]Page{},
		ContentSecurityPolicy: "default-src 'none'; style-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) +
			"'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
	}
	templates, err := template.New("").Parse(pages)
	if err != nil {
		return nil, err
	}
	render := func(name string, data any) (Page, error) {
		var body strings.Builder
		// The hash in the header is of these very bytes, so the style sheet must not be escaped.
		err := templates.ExecuteTemplate(&body, name, struct {
			Style template.CSS
			Title string
			Page  any
		}{template.CSS(style), doc.get("info", "title").text(), data}) //nolint:gosec // the style sheet is our own
		return newPage([]byte(body.String()), htmlType), err
	}
	view, err := newDocsView(doc)
	if err != nil {
		return nil, fmt.Errorf("openapi.yaml: %w", err)
	}
	if site.Docs, err = render("docs", view); err != nil {
		return nil, err
	}
	if site.Problems, err = render("problems", view.Problems); err != nil {
		return nil, err
	}
	for _, p := range view.Problems {
		if site.ProblemPages[p.Slug], err = render("problem", p); err != nil {
			return nil, err
		}
		text, err := p.json()
		if err != nil {
			return nil, err
		}
		site.ProblemJSON[p.Slug] = newPage(text, jsonType)
	}
	return site, nil
}

func newPage(body []byte, contentType string) Page {
	sum := sha256.Sum256(body)
	return Page{body, `"` + base64.RawURLEncoding.EncodeToString(sum[:12]) + `"`, contentType}
}

// json explains the problem to programs.
func (p problemView) json() ([]byte, error) {
	text, err := json.Marshal(struct {
		Type     string          `json:"type"`
		Title    string          `json:"title"`
		Status   int             `json:"status"`
		Happened string          `json:"happened"`
		Done     string          `json:"done"`
		Todo     string          `json:"todo"`
		Example  json.RawMessage `json:"example"`
	}{p.Type, p.Title, p.Status, p.happened, p.done, p.todo, json.RawMessage(p.Example)})
	return append(text, '\n'), err
}

// refsMax bounds the references that lead from one to the next, so that a circle is an error.
const refsMax = 10

// document is a parsed description. Its mappings keep their order, which is the order of the page.
type document struct{ root *yaml.Node }

// value is a part of a document; the zero value is a missing part. References are followed when a member is read.
type value struct {
	doc  document
	node *yaml.Node
}

// member is a named part of a mapping.
type member struct {
	name string
	value
	// ref is the last part of the reference that was followed to the value, or empty.
	ref string
}

func parse(source []byte) (document, error) {
	var root yaml.Node
	if err := yaml.Unmarshal(source, &root); err != nil {
		return document{}, err
	}
	if len(root.Content) != 1 {
		return document{}, errors.New("the document is empty")
	}
	return document{root.Content[0]}, nil
}

func (d document) get(path ...string) value { return value{d, d.root}.get(path...) }

// get returns the member at the end of a path of names.
func (v value) get(path ...string) value {
	for _, name := range path {
		found, _ := v.lookup(name)
		v = found.value
	}
	return v
}

func (v value) lookup(name string) (found member, ok bool) {
	node := v.resolve()
	for i := range count(node) {
		if node.Content[2*i].Value == name {
			return v.member(node, i), true
		}
	}
	return member{}, false
}

// members returns the members of a mapping, with references followed.
func (v value) members() []member {
	node := v.resolve()
	members := make([]member, count(node))
	for i := range members {
		members[i] = v.member(node, i)
	}
	return members
}

// member returns the i-th member of the mapping that the value resolves to.
func (v value) member(mapping *yaml.Node, i int) member {
	target := value{v.doc, mapping.Content[2*i+1]}
	return member{name: mapping.Content[2*i].Value, value: target, ref: target.ref()}
}

// count returns the number of members of a mapping, or 0 for another node.
func count(node *yaml.Node) int {
	if node == nil || node.Kind != yaml.MappingNode {
		return 0
	}
	return len(node.Content) / 2
}

// items returns the items of a sequence.
func (v value) items() []member {
	node := v.resolve()
	if node == nil || node.Kind != yaml.SequenceNode {
		return nil
	}
	items := make([]member, len(node.Content))
	for i, item := range node.Content {
		target := value{v.doc, item}
		items[i] = member{value: target, ref: target.ref()}
	}
	return items
}

func (v value) exists() bool { return v.node != nil }

// text returns a scalar, or "".
func (v value) text() string {
	if node := v.resolve(); node != nil && node.Kind == yaml.ScalarNode {
		return node.Value
	}
	return ""
}

// ref returns the last part of the reference that the value is, or "".
func (v value) ref() string {
	pointer := v.pointer()
	return pointer[strings.LastIndexByte(pointer, '/')+1:]
}

// pointer returns the reference that the value is, or "".
func (v value) pointer() string { return v.own("$ref") }

// own returns a scalar member of the value itself, without following a reference, or "".
func (v value) own(name string) string {
	node := alias(v.node)
	for i := range count(node) {
		if node.Content[2*i].Value == name {
			return node.Content[2*i+1].Value
		}
	}
	return ""
}

// beside returns a member that stands beside a reference or, without one there, in what it refers to.
func (v value) beside(name string) string {
	return cmp.Or(v.own(name), v.get(name).text())
}

// resolve follows references.
func (v value) resolve() *yaml.Node {
	for range refsMax {
		pointer := v.pointer()
		if pointer == "" {
			return alias(v.node)
		}
		v = v.doc.get(strings.Split(strings.TrimPrefix(pointer, "#/"), "/")...)
	}
	return nil
}

func alias(node *yaml.Node) *yaml.Node {
	if node != nil && node.Kind == yaml.AliasNode {
		return node.Alias
	}
	return node
}

// appendJSON appends a value in JSON. References stay as they are written, and members in their order.
func appendJSON(dst []byte, node *yaml.Node) ([]byte, error) {
	if node = alias(node); node == nil {
		return nil, errors.New("a reference leads nowhere")
	}
	var err error
	switch node.Kind {
	case yaml.MappingNode:
		dst = append(dst, '{')
		for i := 0; i+1 < len(node.Content); i += 2 {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst, _ = jsontext.AppendQuote(dst, node.Content[i].Value) // fails for invalid UTF-8, which YAML has not
			if dst, err = appendJSON(append(dst, ':'), node.Content[i+1]); err != nil {
				return nil, err
			}
		}
		return append(dst, '}'), nil
	case yaml.SequenceNode:
		dst = append(dst, '[')
		for i, item := range node.Content {
			if i > 0 {
				dst = append(dst, ',')
			}
			if dst, err = appendJSON(dst, item); err != nil {
				return nil, err
			}
		}
		return append(dst, ']'), nil
	default:
		var scalar any
		if err := node.Decode(&scalar); err != nil {
			return nil, err
		}
		text, err := json.Marshal(scalar)
		return append(dst, text...), err
	}
}
