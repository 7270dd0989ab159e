package dashboard

import (
	"net/http"
	"net/url"
	"strings"
	"time"

	"stampede/dashboard/session"
	"stampede/internal/operators"
)

// loginPage is the body of the login.
type loginPage struct {
	Next, Problem string
	// Disabled is true if nobody can log in.
	Disabled bool
}

func (d *Dashboard) showLogin(w http.ResponseWriter, r *http.Request) {
	body := loginPage{Next: localPath(r.URL.Query().Get("next")), Disabled: !d.Operators.Configured()}
	if r.URL.Query().Has("over") {
		body.Problem = "Your session is over. Log in, and repeat what you did: nothing was done."
	}
	d.render(w, r, nil, http.StatusOK, "login", "Log in", body)
}

// login makes a new session: one that the browser had before is never taken over.
func (d *Dashboard) login(w http.ResponseWriter, r *http.Request) {
	if err := r.ParseForm(); err != nil {
		writeText(w, http.StatusBadRequest, "The form cannot be read.")
		return
	}
	body := loginPage{Next: localPath(r.PostForm.Get("next"))}
	client := d.clientOf(r)
	if _, ok := d.byAddr.Take(client, time.Now()); !ok || !d.logins.Allow() {
		d.metrics.logins.WithLabelValues(loginLimited).Inc()
		body.Problem = "Too many logins. Wait a minute, and try again."
		w.Header().Set("Retry-After", "60")
		d.render(w, r, nil, http.StatusTooManyRequests, "login", "Log in", body)
		return
	}
	id, who, ok := d.sessions.Login(strings.TrimSpace(r.PostForm.Get("token")))
	if !ok {
		d.metrics.logins.WithLabelValues(loginRefused).Inc()
		d.Logger.WarnContext(r.Context(), "a login was refused", "client", client)
		body.Problem = "This is the token of no operator."
		d.render(w, r, nil, http.StatusUnauthorized, "login", "Log in", body)
		return
	}
	if old, ok := d.sessionOf(r); ok {
		old.End()
	}
	d.metrics.logins.WithLabelValues(loginOK).Inc()
	d.Logger.InfoContext(r.Context(), "an operator logged in", "operator", who.Name, "role", who.Role.String(),
		"client", client)
	d.setCookie(w, r, id, int(session.Lifetime.Seconds()))
	http.Redirect(w, r, body.Next, http.StatusSeeOther)
}

func (d *Dashboard) logout(w http.ResponseWriter, r *http.Request, s *session.Session) {
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

// may reports whether the operator has at least this role.
func may(who operators.Person, role operators.Role) bool { return who.Role >= role }
