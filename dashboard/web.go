package dashboard

import (
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"stampede/dashboard/session"
	"stampede/internal/accept"
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
