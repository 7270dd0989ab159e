package dashboard

import (
	"bytes"
	"html/template"
	"io/fs"
	"net/http"
	"net/url"
	"path"
	"strings"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	"github.com/yuin/goldmark/parser"
	"github.com/yuin/goldmark/text"
	"github.com/yuin/goldmark/util"

	"stampede/dashboard/session"
	"stampede/docs"
)

const runbook = "runbook"

// book is a page of docs/ as HTML. HTML within it is left out by goldmark.
type book struct {
	Title string
	HTML  template.HTML
}

// bookURL is the place of a section of the runbook.
func bookURL(anchor string) string {
	return (&url.URL{Path: "/docs/" + runbook, Fragment: anchor}).String()
}

// readBooks renders all pages of docs/, so that their links to each other work.
func readBooks() (map[string]book, error) {
	markdown := goldmark.New(
		goldmark.WithExtensions(extension.GFM),
		goldmark.WithParserOptions(parser.WithAutoHeadingID(), parser.WithASTTransformers(util.Prioritized(links{}, 1))),
	)
	books := make(map[string]book)
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
		books[strings.TrimSuffix(file, ".md")] = book{title, template.HTML(b.String())} // without HTML of its own
	}
	return books, nil
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

func (d *Dashboard) showBook(w http.ResponseWriter, r *http.Request, s *session.Session) {
	page, known := d.books[r.PathValue("page")]
	if !known {
		d.showError(w, r, s, http.StatusNotFound, "There is no such page of the documentation.")
		return
	}
	d.render(w, r, s, http.StatusOK, "book", page.Title, page)
}
