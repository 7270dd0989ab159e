package apidoc

import (
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html/template"
	"strings"
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
