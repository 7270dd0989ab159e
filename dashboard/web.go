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
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	"github.com/yuin/goldmark/parser"
	"github.com/yuin/goldmark/text"
	"github.com/yuin/goldmark/util"

	"stampede/dashboard/session"
	"stampede/docs"
	"stampede/internal/accept"
	"stampede/internal/format"
	"stampede/internal/operators"
	"stampede/internal/ratelimit"
)

// headers are set on every answer. Nothing runs and nothing is shown that is not a file of this program.
var headers = map[string]string{
	"Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
		"form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
	"X-Content-Type-Options":       "nosniff",
	"X-Frame-Options":              "DENY",
	"Referrer-Policy":              "same-origin", // with no-referrer, forms would come from the origin null
	"Cross-Origin-Opener-Policy":   "same-origin",
	"Cross-Origin-Resource-Policy": "same-origin",
	"Permissions-Policy":           "camera=(), geolocation=(), microphone=()",
	"Cache-Control":                "no-store",
}

// gate is in front of all routes: it requires a session, and the role that a route needs.
type gate struct {
	*site
	sessions *session.Sessions
	byAddr   *ratelimit.Limiter
}

func newGate(d *site) *gate {
	return &gate{
		site: d, sessions: session.New(d.Operators), byAddr: ratelimit.New(loginRate, loginBurst),
	}
}

// protect is in front of every route.
func (d *gate) protect(next http.Handler) http.Handler {
	origins := http.NewCrossOriginProtection()
	origins.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		d.metrics.actions.WithLabelValues(actionDenied).Inc()
		writeText(w, http.StatusForbidden, "This form was sent by a page of another origin. Nothing was done.")
	}))
	next = origins.Handler(next)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for name, value := range headers {
			w.Header().Set(name, value)
		}
		if !d.isOwnHost(r) {
			writeText(w, http.StatusMisdirectedRequest, "This dashboard listens on this machine only, as localhost or by its "+
				"address. Behind a proxy, name the proxy in STAMPEDE_TRUSTED_PROXIES.")
			return
		}
		r.Body = http.MaxBytesReader(w, r.Body, maxFormBytes)
		next.ServeHTTP(w, r)
	})
}

// isOwnHost refuses names of other people's domains that lead to this machine (DNS rebinding): on a loopback address
// only its own names are meant, unless a proxy is in front.
func (d *gate) isOwnHost(r *http.Request) bool {
	local, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	if !ok || d.TrustedProxies.Sent(r) {
		return true
	}
	addr, err := netip.ParseAddrPort(local.String())
	if err != nil || !addr.Addr().Unmap().IsLoopback() {
		return true
	}
	host := r.Host
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.Trim(host, "[]")
	_, err = netip.ParseAddr(host)
	return err == nil || strings.EqualFold(host, "localhost")
}

// fetched are the paths that the script of a page requests. Without a session they answer an error; a page redirects to
// the login.
var fetched = []string{"/live", "/history", "/minutes"}

type sessionHandler func(http.ResponseWriter, *http.Request, *session.Session)

// withSession asks for a login where there is none, and refuses a role that is too low, and an action that comes late.
func (d *gate) withSession(action operators.Action, h sessionHandler) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		s, ok := d.session(r)
		acts := r.Method != http.MethodGet && r.Method != http.MethodHead
		switch {
		case !ok && !acts && !slices.Contains(fetched, r.URL.Path):
			to := "/login"
			if r.URL.Path != "/" {
				to += "?next=" + url.QueryEscape(r.URL.RequestURI())
			}
			http.Redirect(w, r, to, http.StatusSeeOther)
		case !ok && acts:
			d.metrics.actions.WithLabelValues(actionDenied).Inc()
			http.Redirect(w, r, "/login?over=1", http.StatusSeeOther)
		case !ok:
			writeText(w, http.StatusUnauthorized, "Log in first.")
		case !s.Person().May(action):
			d.metrics.actions.WithLabelValues(actionDenied).Inc()
			d.Logger.WarnContext(r.Context(), "an operator was denied an action", "operator", s.Person().Name,
				"role", s.Person().Role.String(), "method", r.Method, "path", r.URL.Path)
			d.render(w, r, s, problemPage(http.StatusForbidden,
				"This takes the role "+action.Lowest().String()+", and you are "+s.Person().Role.String()+
					". Nothing was done.", ""))
		case acts && accept.Arrived(w, r).IsLate(): // as of an ingress
			d.metrics.actions.WithLabelValues(actionFailed).Inc()
			d.render(w, r, s, problemPage(http.StatusServiceUnavailable,
				"The dashboard did not answer in time. Nothing was done.", ""))
		default:
			h(w, r, s)
		}
	}
}

// cookie is the name of the cookie; browsers refuse one with the prefix __Host- from anything but this host over TLS.
const (
	cookie       = "stampede-session"
	secureCookie = "__Host-" + cookie
)

func (d *gate) cookieName(r *http.Request) string {
	if d.TrustedProxies.Secure(r) {
		return secureCookie
	}
	return cookie
}

func (d *gate) session(r *http.Request) (*session.Session, bool) {
	c, err := r.Cookie(d.cookieName(r))
	if err != nil {
		return nil, false
	}
	return d.sessions.Find(c.Value)
}

func (d *gate) setCookie(w http.ResponseWriter, r *http.Request, value string, seconds int) {
	http.SetCookie(w, &http.Cookie{
		Name: d.cookieName(r), Value: value, Path: "/", MaxAge: seconds,
		HttpOnly: true, Secure: d.TrustedProxies.Secure(r), SameSite: http.SameSiteStrictMode,
	})
}

func writeText(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	_, _ = w.Write([]byte(text + "\n"))
}

// The logins of an address. There is no limit for all of them: strangers at many addresses would lock operators out,
// and a guess costs one hash.
const loginRate, loginBurst = 10.0 / 60, 10

// loginPage is the body of the login.
type loginPage struct {
	Next, Problem string
	// Disabled is true if nobody can log in.
	Disabled bool
}

func (d *gate) showLogin(w http.ResponseWriter, r *http.Request) {
	body := loginPage{Next: localPath(r.URL.Query().Get("next")), Disabled: !d.Operators.Configured()}
	if r.URL.Query().Has("over") {
		body.Problem = "Your session is over. Log in, and repeat what you did: nothing was done."
	}
	d.renderLogin(w, r, http.StatusOK, body)
}

func (d *gate) renderLogin(w http.ResponseWriter, r *http.Request, status int, body loginPage) {
	d.render(w, r, nil, page{template: "login", title: "Log in", body: body, status: status})
}

// login makes a new session: one that the browser had before is never taken over.
func (d *gate) login(w http.ResponseWriter, r *http.Request) {
	if err := r.ParseForm(); err != nil {
		writeText(w, http.StatusBadRequest, "The form cannot be read.")
		return
	}
	body := loginPage{Next: localPath(r.PostForm.Get("next"))}
	client := d.TrustedProxies.Key(r).String()
	if _, ok := d.byAddr.Take(client, time.Now()); !ok {
		d.metrics.logins.WithLabelValues(loginLimited).Inc()
		body.Problem = "Too many logins. Wait a minute, and try again."
		w.Header().Set("Retry-After", "60")
		d.renderLogin(w, r, http.StatusTooManyRequests, body)
		return
	}
	id, who, ok := d.sessions.Login(field(r.PostForm, "token"))
	if !ok {
		d.metrics.logins.WithLabelValues(loginRefused).Inc()
		d.Logger.WarnContext(r.Context(), "a login was refused", "client", client)
		body.Problem = "This is the token of no operator."
		d.renderLogin(w, r, http.StatusUnauthorized, body)
		return
	}
	if old, ok := d.session(r); ok {
		old.End()
	}
	d.metrics.logins.WithLabelValues(loginOK).Inc()
	d.Logger.InfoContext(r.Context(), "an operator logged in", "operator", who.Name, "role", who.Role.String(),
		"client", client)
	d.setCookie(w, r, id, int(session.Lifetime.Seconds()))
	http.Redirect(w, r, body.Next, http.StatusSeeOther)
}

func (d *gate) logout(w http.ResponseWriter, r *http.Request, s *session.Session) {
	s.End()
	d.setCookie(w, r, "", -1)
	http.Redirect(w, r, "/login", http.StatusSeeOther)
}

// localPath is where to go after the login: a page of the dashboard, and nothing else.
func localPath(text string) string {
	u, err := url.Parse(text)
	if err != nil || u.IsAbs() || u.Host != "" || u.User != nil || u.Opaque != "" ||
		!strings.HasPrefix(u.Path, "/") || strings.HasPrefix(u.Path, "//") || strings.ContainsAny(text, "\\\r\n\t") {
		return "/"
	}
	local := url.URL{Path: u.Path, RawQuery: u.RawQuery}
	return local.RequestURI()
}

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
		cells[i] = format.Cell(cells[i])
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
