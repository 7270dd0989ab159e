package dashboard

import (
	"bytes"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/csv"
	"encoding/hex"
	"html/template"
	"io/fs"
	"net/http"
	"net/url"
	"path"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	"github.com/yuin/goldmark/parser"
	"github.com/yuin/goldmark/text"
	"github.com/yuin/goldmark/util"

	"stampede/docs"
	"stampede/internal/figure"
)

//go:embed assets
var assetFiles embed.FS

// asset is a file for browsers. Its URL has a part of its hash, so that it can be kept for ever.
type asset struct {
	text []byte
	url  string
}

// assets are the files by name.
type assets map[string]asset

func readAssets() (assets, error) {
	found := make(assets)
	files, err := assetFiles.ReadDir("assets")
	if err != nil {
		return nil, err
	}
	for _, f := range files {
		text, err := assetFiles.ReadFile(path.Join("assets", f.Name()))
		if err != nil {
			return nil, err
		}
		hash := sha256.Sum256(text)
		found[f.Name()] = asset{text, "/assets/" + f.Name() + "?v=" + hex.EncodeToString(hash[:6])}
	}
	return found, nil
}

// ServeHTTP implements http.Handler.
func (all assets) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a, ok := all[r.PathValue("file")]
	if !ok {
		writeText(w, http.StatusNotFound, "There is no such file.")
		return
	}
	if r.URL.RequestURI() == a.url {
		w.Header().Set("Cache-Control", "public, max-age=31536000, immutable")
	}
	http.ServeContent(w, r, r.PathValue("file"), time.Time{}, bytes.NewReader(a.text))
}

// csvFile is an answer that browsers save. Errors are those of the browser.
type csvFile struct{ *csv.Writer }

func newFile(w http.ResponseWriter, name string, columns ...string) csvFile {
	w.Header().Set("Content-Type", "text/csv; charset=utf-8")
	w.Header().Set("Content-Disposition",
		`attachment; filename="stampede-`+name+`-`+time.Now().UTC().Format("20060102T150405Z")+`.csv"`)
	file := csvFile{csv.NewWriter(w)}
	file.row(columns...)
	return file
}

// row writes untrusted texts as a row.
func (f csvFile) row(cells ...string) {
	for i := range cells {
		cells[i] = figure.Cell(cells[i])
	}
	_ = f.Write(cells)
}

// idText is the text of an id, empty for none.
func idText(id uuid.UUID) string {
	if id == uuid.Nil {
		return ""
	}
	return id.String()
}

const runbook = "runbook"

// book is a page of docs/ as HTML. HTML within it is left out by goldmark.
type book struct {
	Title string
	HTML  template.HTML
}

// keyboard makes what may be wider than the page scroll by the keyboard, too.
var keyboard = strings.NewReplacer("<pre>", `<pre tabindex="0">`, "<table>", `<table tabindex="0">`)

// books are the pages of docs/ by name.
type books map[string]book

// bookURL is the place of a section of the runbook.
func bookURL(anchor string) string {
	return (&url.URL{Path: "/docs/" + runbook, Fragment: anchor}).String()
}

// readBooks renders all pages of docs/, so that their links to each other work.
func readBooks() (books, error) {
	markdown := goldmark.New(
		goldmark.WithExtensions(extension.GFM),
		goldmark.WithParserOptions(parser.WithAutoHeadingID(), parser.WithASTTransformers(util.Prioritized(links{}, 1))),
	)
	found := make(books)
	files, err := fs.Glob(docs.Pages, "*.md")
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		source, err := docs.Pages.ReadFile(file)
		if err != nil {
			return nil, err
		}
		var b bytes.Buffer
		if err := markdown.Convert(source, &b); err != nil {
			return nil, err
		}
		title, _, _ := strings.Cut(strings.TrimPrefix(string(source), "# "), "\n")
		html := keyboard.Replace(b.String())
		found[strings.TrimSuffix(file, ".md")] = book{title, template.HTML(html)} // without HTML of its own
	}
	return found, nil
}

// links changes the links between pages of docs/ to those of the dashboard. Other files of the sources are not here:
// their links become text.
type links struct{}

// Transform implements parser.ASTTransformer.
func (links) Transform(doc *ast.Document, reader text.Reader, _ parser.Context) {
	var gone []ast.Node
	_ = ast.Walk(doc, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if !entering {
			return ast.WalkContinue, nil
		}
		switch link := n.(type) {
		case *ast.Link:
			to := string(link.Destination)
			page, anchor, _ := strings.Cut(to, "#")
			switch {
			case strings.HasPrefix(to, "#"), strings.HasPrefix(to, "https://"):
			case path.Ext(page) == ".md" && !strings.Contains(page, "/"):
				at := url.URL{Path: "/docs/" + strings.TrimSuffix(page, ".md"), Fragment: anchor}
				link.Destination = []byte(at.String())
			default:
				gone = append(gone, n)
			}
		case *ast.Image:
			gone = append(gone, n)
		}
		return ast.WalkContinue, nil
	})
	for _, n := range gone {
		parent := n.Parent()
		for child := n.FirstChild(); child != nil; child = n.FirstChild() {
			parent.InsertBefore(parent, n, child)
		}
		parent.RemoveChild(parent, n)
	}
}

func (all books) show(_ context.Context, r *http.Request) (page, error) {
	b, known := all[r.PathValue("page")]
	if !known {
		return problemPage(http.StatusNotFound, "There is no such page of the documentation.", ""), nil
	}
	return page{template: "book", title: b.Title, body: b}, nil
}
