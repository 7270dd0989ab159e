package dashboard

import (
	"bytes"
	"cmp"
	"context"
	"embed"
	"fmt"
	"html/template"
	"io/fs"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"stampede/dashboard/fleet"
	"stampede/dashboard/live"
	"stampede/dashboard/session"
	"stampede/internal/format"
	"stampede/internal/operators"
	"stampede/internal/telemetry"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
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

	assets assets
}

// shown is a snapshot for templates.
type shown struct {
	*fleet.Snapshot
	// seen says who has acknowledged a trouble, by its key.
	seen map[string]string
}

// SeenBy is who has acknowledged a trouble, "" if nobody has.
func (s shown) SeenBy(t fleet.Trouble) string { return s.seen[t.Key] }

// Unseen is how many troubles nobody has acknowledged.
func (s shown) Unseen() (n int) {
	for _, t := range s.Troubles {
		if s.seen[t.Key] == "" {
			n++
		}
	}
	return n
}

// ChartsAt leads to the charts, at the time at which a trouble began; "" if they do not reach back to it.
func (s shown) ChartsAt(t fleet.Trouble) string {
	if s.At.Sub(t.Since) > marksAge {
		return ""
	}
	return fmt.Sprintf("/?at=%d#h-charts", t.Since.UnixMilli())
}

// HasCritical is true if buyers notice what is wrong, or will, and nobody has acknowledged it.
func (s shown) HasCritical() bool {
	return slices.ContainsFunc(s.Troubles, func(t fleet.Trouble) bool {
		return t.Severity == fleet.Critical && s.seen[t.Key] == ""
	})
}

// salesShown bounds the sales of the overview.
const salesShown = 10

// FirstSales are those of the overview, and MoreSales is how many others there are.
func (s shown) FirstSales() []fleet.Sale { return s.Sales[:min(len(s.Sales), salesShown)] }
func (s shown) MoreSales() int           { return len(s.Sales) - len(s.FirstSales()) }

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

// May reports whether the operator may take an action.
func (v view) May(action operators.Action) bool { return v.Who != nil && v.Who.May(action) }

// Asset is the URL of a file.
func (v view) Asset(name string) string { return v.assets[name].url }

// Version is the version of the program.
func (v view) Version() string { return telemetry.BuildVersion() }

// functions are what templates call.
var functions = template.FuncMap{
	"moment": moment, "exact": exact, "hour": hourOf, "value": eventValue,
	"printable": format.Printable, "money": format.Money, "lasting": lasting, "gap": gap, "join": strings.Join,
	"fields": func(v any) []string { return strings.Fields(fmt.Sprint(v)) },
	"count":  func(n int64) string { return count(n) },
	"count0": func(n int) string { return count(n) },
	"book":   bookURL,
	"short":  short,
	"isZero": func(id uuid.UUID) bool { return id == uuid.Nil },
	"minutes": func(d time.Duration) string {
		if d <= 0 {
			return "none: confirmed is final"
		}
		return lasting(d)
	},
	"place":  place,
	"words":  words,
	"hours":  func(n int64) string { return lasting(time.Duration(n) * time.Hour) },
	"items":  order.Items.Text,
	"left":   leftText,
	"concat": func(parts ...string) string { return strings.Join(parts, "") },
	"charts": scopeCharts,
	"funnel": func() []bar { return funnel },
	"mark":   func(state string) string { return marks[state] },
	"orders": func(user string) string { return "/orders?" + url.Values{"user": {user}}.Encode() },
	"more":   func(found int64, shown []audit.Finding) int64 { return found - int64(len(shown)) },
	"class":  func(state string) string { return strings.ReplaceAll(state, " ", "-") },
	"list":   func(one ...string) []string { return one },
	// for a shell
	"quoted": func(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" },
	"label":  func(tab string) string { return tabs[tab] },
	"tabbed": func(page, tab string) bool { return page == tab || pageOf[page] == tab },
}

// tabs are the pages that every page leads to, and pageOf says which of them leads to another.
var (
	tabs = map[string]string{
		"overview": "Overview", "sales": "Sales", "orders": "Orders", "letters": "Dead letters", "refunds": "Refunds",
		"targets": "Targets", "audit": "Audit", "book": "Runbook",
	}
	pageOf = map[string]string{
		"sale": "sales", "draw": "sales", "order": "orders", "letter": "letters", "target": "targets",
	}
)

// marks say a state without its colour.
var marks = map[string]string{
	string(reservation.StateOpen): "▶", string(reservation.StatePaused): "❚❚",
	string(reservation.StateScheduled): "◷", string(reservation.StateEnded): "■",
	fleet.SoldOut: "●", fleet.NotSelling: "⚠",
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

// templates are the pages by name, each with the layout, and the fragments alone.
type templates struct {
	pages map[string]*template.Template
	parts *template.Template
}

func readTemplates(keys reservation.Keys) (t templates, err error) {
	t = templates{pages: make(map[string]*template.Template)}
	partitions := make(map[string]string, keys.Partitions) // by the names of their streams, which say nothing to people
	for p := range keys.Partitions {
		partitions[keys.Orders(p)] = strconv.Itoa(p)
	}
	named := template.FuncMap{"partitions": func(streams []string) string {
		var names []string
		for _, s := range streams {
			names = append(names, cmp.Or(partitions[s], format.Printable(s)))
		}
		return "partition " + strings.Join(names, ", ")
	}}
	empty := template.New("").Funcs(functions).Funcs(named)
	if t.parts, err = empty.ParseFS(pageFiles, "pages/layout/*.html"); err != nil {
		return t, err
	}
	files, err := fs.Glob(pageFiles, "pages/*.html")
	if err != nil {
		return t, err
	}
	for _, file := range files {
		page, err := template.Must(t.parts.Clone()).ParseFS(pageFiles, file)
		if err != nil {
			return t, err
		}
		t.pages[strings.TrimSuffix(path.Base(file), ".html")] = page
	}
	return t, nil
}

// site is what all pages share: it renders them, and runs the actions of their forms.
type site struct {
	Config
	templates
	assets  assets
	boards  *boards
	metrics *metrics
	journal *journal
}

// page is what a request gets to see.
type page struct {
	template, title string
	body            any
	status          int // 0: 200
	// moved is the URL of another page to go to instead, part the name of a part that is wanted without its page.
	moved, part string
}

// render answers with a page. The session is nil before the login.
func (d *site) render(w http.ResponseWriter, r *http.Request, s *session.Session, p page) {
	v := view{Title: p.title, Nav: p.template, Now: time.Now(), Body: p.body, assets: d.assets}
	if s != nil {
		who, snapshot := s.Person(), d.Fleet.Snapshot()
		v.Who, v.Notes, v.Board, v.Snapshot = &who, s.Notes(), d.boards.render(snapshot), &shown{snapshot, nil}
		v.Snapshot.seen, _ = d.journal.seenTroubles()
	}
	if p.template == "overview" || r.URL.Query().Get("refresh") == "5" {
		v.Refresh = 5
	}
	var b bytes.Buffer
	if err := d.pages[p.template].ExecuteTemplate(&b, "layout", v); err != nil {
		d.Logger.ErrorContext(r.Context(), "a page cannot be shown", "page", p.template, "error", err)
		writeText(w, http.StatusInternalServerError, "This page cannot be shown. The log of the dashboard says why.")
		return
	}
	writeHTML(w, cmp.Or(p.status, http.StatusOK), b.Bytes())
}

func writeHTML(w http.ResponseWriter, status int, html []byte) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(status)
	_, _ = w.Write(html)
}

// problem is the body of a page that says what is wrong.
type problem struct{ Text, Hint string }

func problemPage(status int, text, hint string) page {
	return page{template: "error", title: "Not possible", body: problem{text, hint}, status: status}
}

// fail answers a request whose page or form could not be read.
func (d *site) fail(w http.ResponseWriter, r *http.Request, s *session.Session, err error) {
	text, hint, status := explain(err)
	if status >= http.StatusInternalServerError {
		d.Logger.WarnContext(r.Context(), "a page could not be read", "path", r.URL.Path, "error", err)
	}
	d.render(w, r, s, problemPage(status, text, hint))
}

const (
	// lookTimeout bounds what a page asks the servers, actTimeout what an action does.
	lookTimeout = 5 * time.Second
	actTimeout  = 15 * time.Second
	// bulkMax bounds what one action is done to, and bulkTimeout such an action; what was not done then is said.
	bulkMax     = 100
	bulkTimeout = 60 * time.Second
	// subjectMax bounds, in the journal, what an action is done to: the form may have any text there.
	subjectMax = 2500
)

// look returns the handler of a page that read returns.
func (d *site) look(read func(context.Context, *http.Request) (page, error)) sessionHandler {
	return func(w http.ResponseWriter, r *http.Request, s *session.Session) {
		ctx, cancel := context.WithTimeout(r.Context(), lookTimeout)
		defer cancel()
		switch p, err := read(ctx, r); {
		case err != nil:
			d.fail(w, r, s, err)
		case p.moved != "":
			http.Redirect(w, r, p.moved, http.StatusSeeOther)
		case p.part != "":
			writeHTML(w, http.StatusOK, []byte(fragment(d.parts, p.part, d.Fleet.Snapshot(), p.body)))
		default:
			d.render(w, r, s, p)
		}
	}
}

// action is what an operator wants to be done.
type action struct {
	name string // in the log
	ids  []any  // what it is done to, in the log
	to   string // the page to show then
	// do returns what was done.
	do func() (string, error)
}

// act returns the handler of a form: it runs the action that read returns, logs it, and keeps what it has to say for
// the page that follows. An operator who closes the page does not take back what was begun.
func (d *site) act(
	timeout time.Duration, read func(ctx context.Context, r *http.Request, operator string) (action, error),
) sessionHandler {
	return func(w http.ResponseWriter, r *http.Request, s *session.Session) {
		if err := r.ParseForm(); err != nil {
			d.render(w, r, s, problemPage(http.StatusBadRequest,
				"The form cannot be read, or is too large. Nothing was done.", ""))
			return
		}
		operator := s.Person().Name
		ctx, cancel := context.WithTimeout(catalog.WithOperator(context.WithoutCancel(r.Context()), operator), timeout)
		defer cancel()
		a, err := read(ctx, r, operator)
		if err != nil {
			d.fail(w, r, s, err)
			return
		}
		done, err := a.do()
		did := event{At: time.Now(), Kind: "action", Operator: operator}
		subject := []rune(strings.TrimSpace(fmt.Sprintln(append([]any{a.name}, a.ids...)...)))
		did.What = format.Printable(string(subject[:min(len(subject), subjectMax)])) + ": "
		log := d.Logger.With(append([]any{"operator", operator, "action", a.name}, a.ids...)...)
		if err != nil {
			text, hint, _ := explain(err)
			d.metrics.actions.WithLabelValues(actionFailed).Inc()
			log.WarnContext(r.Context(), "an action of an operator failed", "error", err)
			did.What += "not done: " + text
			s.Tell(session.Note{Failed: true, Text: text, Hint: hint})
		} else {
			d.metrics.actions.WithLabelValues(actionOK).Inc()
			log.InfoContext(r.Context(), "an operator acted", "did", done)
			did.What += done
			s.Tell(session.Note{Text: done})
		}
		d.journal.add(did)
		http.Redirect(w, r, a.to, http.StatusSeeOther)
	}
}

// each does something to each of many, and says what became of all, and of the first ones that failed.
func each[T any](all []T, said func(done int) string, do func(T) error) (string, error) {
	const saidMax = 5
	var failed []string
	done := 0
	var last error
	for _, one := range all {
		err := do(one)
		if err == nil {
			done++
			continue
		}
		text, _, _ := explain(err)
		failed, last = append(failed, format.Printable(fmt.Sprint(one))+": "+text), err
	}
	switch {
	case len(failed) == 0:
		return said(done), nil
	case len(all) == 1:
		return "", last
	}
	hint := strings.Join(failed[:min(len(failed), saidMax)], " ")
	if rest := len(failed) - saidMax; rest > 0 {
		hint += fmt.Sprintf(" And %d more.", rest)
	}
	return "", &refusal{fmt.Sprintf("%s %s failed.", said(done), count(len(failed))), hint}
}

// errForm is the answer to a form that no page has made.
var errForm = &refusal{"The form is damaged.", "Nothing was done. Load the page again."}

// field is a value of a form or a query, without the blanks that people copy with it.
func field(values url.Values, name string) string { return strings.TrimSpace(values.Get(name)) }
