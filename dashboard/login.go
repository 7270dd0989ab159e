package dashboard

import (
	"net/http"
	"net/url"
	"strings"
	"time"

	"stampede/dashboard/session"
)

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
