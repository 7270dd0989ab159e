package dashboard

import (
	"bytes"
	"embed"
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"

	"stampede/dashboard/fleet"
	"stampede/dashboard/live"
	"stampede/dashboard/session"
	"stampede/internal/figure"
	"stampede/internal/operators"
	"stampede/internal/telemetry"
	"stampede/reservation"
	"stampede/upkeep/audit"
)

//go:embed pages
var pageFiles embed.FS

// view is what a template sees. Who is nil before the login, and in a fragment, which is the same for all.
type view struct {
	Title, Nav string
	Who        *operators.Person
	Notes      []session.Note
	Board      *live.Board // nil in a fragment
	Now        time.Time
	// Refresh is how often a browser without script loads the page again, in seconds; 0: never.
	Refresh int
	Body    any
	// Snapshot is the one of the board.
	Snapshot *shown

	dash *Dashboard
}

// shown is a snapshot for templates.
type shown struct{ *fleet.Snapshot }

// HasCritical is true if buyers notice what is wrong, or will.
func (s shown) HasCritical() bool {
	return slices.ContainsFunc(s.Troubles, func(t fleet.Trouble) bool { return t.Severity == fleet.Critical })
}

// Live is a figure that changes while the page is open.
func (v view) Live(key ...string) template.HTML {
	name := strings.Join(key, "")
	return template.HTML(`<span data-live="` + template.HTMLEscapeString(name) + `">` + // both are escaped
		template.HTMLEscapeString(v.text(name)) + `</span>`)
}

// Width is a figure as the attribute of a drawing.
func (v view) Width(key ...string) string {
	if text := v.text(strings.Join(key, "")); text != "" {
		return text
	}
	return "0%"
}

// Is reports whether a value is one of these.
func (v view) Is(key string, values ...string) bool {
	for _, value := range values {
		if v.text(key) == value {
			return true
		}
	}
	return false
}

func (v view) text(key string) string {
	if v.Board == nil {
		return ""
	}
	return v.Board.Values[key]
}

// With is the view with another body, for a template within.
func (v view) With(body any) view {
	v.Body = body
	return v
}

// Operates and Administers are what the operator may do.
func (v view) Operates() bool    { return v.Who != nil && may(*v.Who, operators.Operator) }
func (v view) Administers() bool { return v.Who != nil && may(*v.Who, operators.Admin) }

// Asset is the URL of a file.
func (v view) Asset(name string) string { return v.dash.assets[name].url }

// Version is the version of the program.
func (v view) Version() string { return telemetry.BuildVersion() }

// functions are what templates call.
var functions = template.FuncMap{
	"moment": moment, "exact": exact, "printable": figure.Printable, "lasting": lasting, "gap": gap, "join": strings.Join,
	"fields": func(v any) []string { return strings.Fields(fmt.Sprint(v)) },
	"count":  func(n int64) string { return count(n) },
	"count0": func(n int) string { return count(n) },
	"book":   bookURL,
	"short":  func(id uuid.UUID) string { return id.String()[:8] },
	"isZero": func(id uuid.UUID) bool { return id == uuid.Nil },
	"minutes": func(d time.Duration) string {
		if d <= 0 {
			return "none: confirmed is final"
		}
		return lasting(d)
	},
	"place":  place,
	"concat": func(parts ...string) string { return strings.Join(parts, "") },
	"charts": chartsOf,
	"funnel": func() []bar { return funnel },
	"mark":   func(s reservation.State) string { return marks[s] },
	"orders": func(user string) string { return "/orders?" + url.Values{"user": {user}}.Encode() },
	"more":   func(found int64, shown []audit.Finding) int64 { return found - int64(len(shown)) },
	"label":  func(tab string) string { return tabs[tab] },
	"tabbed": func(page, tab string) bool { return page == tab || pageOf[page] == tab },
}

// tabs are the pages that every page leads to, and pageOf says which of them leads to another.
var (
	tabs = map[string]string{
		"overview": "Overview", "sales": "Sales", "orders": "Orders", "letters": "Dead letters", "audit": "Audit",
		"book": "Runbook",
	}
	pageOf = map[string]string{"sale": "sales", "order": "orders", "letter": "letters"}
)

// marks say a state without its colour.
var marks = map[reservation.State]string{
	reservation.StateOpen: "▶", reservation.StatePaused: "❚❚",
	reservation.StateScheduled: "◷", reservation.StateEnded: "■",
}

// bar is a row of the funnel.
type bar struct{ Key, Label string }

var funnel = []bar{
	{"accepted", "accepted"},
	{"confirmed", "confirmed"},
	{"paid", "paid"},
	{"cancelled", "cancelled"},
	{"expired", "expired"},
	{"rejected", "rejected"},
	{"voided", "voided"},
}

// readPages parses each page with the layout, and the fragments alone.
func (d *Dashboard) readPages() (pages map[string]*template.Template, parts *template.Template, err error) {
	base, err := template.New("").Funcs(functions).ParseFS(pageFiles, "pages/layout/*.html")
	if err != nil {
		return nil, nil, err
	}
	pages = make(map[string]*template.Template)
	files, err := pageFiles.ReadDir("pages")
	if err != nil {
		return nil, nil, err
	}
	for _, f := range files {
		if f.IsDir() {
			continue
		}
		page, err := template.Must(base.Clone()).ParseFS(pageFiles, path.Join("pages", f.Name()))
		if err != nil {
			return nil, nil, err
		}
		pages[strings.TrimSuffix(f.Name(), ".html")] = page
	}
	return pages, base, nil
}

// render answers with a page.
func (d *Dashboard) render(
	w http.ResponseWriter, r *http.Request, s *session.Session, status int, page, title string, body any,
) {
	v := view{Title: title, Nav: page, Now: time.Now(), Body: body, dash: d}
	if s != nil {
		who, snapshot := s.Person(), d.Fleet.Snapshot()
		v.Who, v.Notes, v.Board, v.Snapshot = &who, s.Notes(), d.boardOf(snapshot), &shown{snapshot}
	}
	if page == "overview" {
		v.Refresh = 5
	} else if r.URL.Query().Get("refresh") == "5" {
		v.Refresh = 5
	}
	var b bytes.Buffer
	if err := d.pages[page].ExecuteTemplate(&b, "layout", v); err != nil {
		d.Logger.ErrorContext(r.Context(), "a page cannot be shown", "page", page, "error", err)
		writeText(w, http.StatusInternalServerError, "This page cannot be shown. The log of the dashboard says why.")
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(status)
	_, _ = w.Write(b.Bytes())
}

// errorPage is the body of a page that says what is wrong.
type errorPage struct{ Text, Hint string }

func (d *Dashboard) showError(w http.ResponseWriter, r *http.Request, s *session.Session, status int, text string) {
	d.render(w, r, s, status, "error", "Not possible", errorPage{Text: text})
}

// fail answers a look that failed.
func (d *Dashboard) fail(w http.ResponseWriter, r *http.Request, s *session.Session, err error) {
	text, hint, status := explain(err)
	if status >= http.StatusInternalServerError {
		d.Logger.WarnContext(r.Context(), "a page could not be read", "path", r.URL.Path, "error", err)
	}
	d.render(w, r, s, status, "error", "Not possible", errorPage{text, hint})
}

// act runs an action of an operator, logs it, keeps what it has to say for the next page, and goes there. The action
// returns what it did.
func (d *Dashboard) act(
	w http.ResponseWriter, r *http.Request, s *session.Session, what, to string, ids []any, do func() (string, error),
) {
	done, err := do()
	log := d.Logger.With(append([]any{"operator", s.Person().Name, "action", what}, ids...)...)
	if err != nil {
		text, hint, _ := explain(err)
		d.metrics.actions.WithLabelValues(actionFailed).Inc()
		log.WarnContext(r.Context(), "an action of an operator failed", "error", err)
		s.Tell(session.Note{Failed: true, Text: text, Hint: hint})
	} else {
		d.metrics.actions.WithLabelValues(actionOK).Inc()
		log.InfoContext(r.Context(), "an operator acted", "did", done)
		s.Tell(session.Note{Text: done})
	}
	http.Redirect(w, r, to, http.StatusSeeOther)
}

// readForm answers a form that cannot be read, which is one that is too large or no form.
func (d *Dashboard) readForm(w http.ResponseWriter, r *http.Request, s *session.Session) bool {
	if err := r.ParseForm(); err != nil {
		d.showError(w, r, s, http.StatusBadRequest, "The form cannot be read, or is too large. Nothing was done.")
		return false
	}
	return true
}

func (d *Dashboard) showOverview(w http.ResponseWriter, r *http.Request, s *session.Session) {
	d.render(w, r, s, http.StatusOK, "overview", "Overview",
		overview{tableOf(d.Fleet.History(), allScope)})
}

// overview is the body of the first page.
type overview struct {
	Table table
}
