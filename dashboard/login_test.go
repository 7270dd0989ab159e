package dashboard

import (
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
)

func (b *browser) cookie() string {
	b.t.Helper()
	at, err := url.Parse(b.desk.url)
	require.NoError(b.t, err)
	for _, c := range b.Jar.Cookies(at) {
		return c.Value
	}
	return ""
}

func TestNothingIsShownWithoutLogin(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	id := d.sale("secret sale", 5)
	d.show(id)
	b := d.browser()
	for _, path := range []string{
		"/", "/sales", "/sales/" + id.String(), "/orders?user=x", "/orders/" + id.String(), "/letters", "/letters/1",
		"/audit", "/docs/operations", "/none",
	} {
		_, page := b.get(path)
		require.Contains(t, page, "Your operator's token", path)
		require.NotContains(t, page, "secret sale", path)
	}
	status, _ := b.do(http.MethodHead, "/", nil, nil)
	require.Equal(t, http.StatusOK, status)
	require.Zero(t, testutil.ToFloat64(d.metrics.actions.WithLabelValues(actionDenied)), "nothing was to be done")
	for _, path := range []string{"/live", "/history?of=all", "/minutes?of=all"} {
		status, _ := b.get(path)
		require.Equal(t, http.StatusUnauthorized, status)
	}
	for _, path := range []string{"/sales/" + id.String() + "/pause", "/audit/run", "/letters", "/logout"} {
		_, page := b.post(path)
		require.Contains(t, page, "Your session is over", path)
	}
	require.EqualValues(t, "open", d.shown(id).State)
	for path, want := range map[string]string{
		"/livez": "ok", "/metrics": "stampede_dashboard_watchers 0",
	} {
		status, text := b.get(path)
		require.Equal(t, http.StatusOK, status)
		require.Contains(t, text, want)
	}
}

func TestLoginMakesNewSession(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	b := d.browser()
	// What the browser had before is not the session: nobody can plant one.
	status, _ := b.do(http.MethodGet, "/", nil, map[string]string{"Cookie": cookie + "=planted"})
	require.Equal(t, http.StatusOK, status)
	_, page := b.post("/login", "token", " ann ", "next", "/letters?status=all")
	require.Contains(t, page, "Dead letters · Stampede")
	first := b.cookie()
	require.Greater(t, len(first), 40)
	_, page = b.post("/login", "token", "ann")
	require.Contains(t, page, "Overview · Stampede")
	second := b.cookie()
	require.NotEqual(t, first, second)
	status, page = d.browser().do(http.MethodGet, "/", nil, map[string]string{"Cookie": cookie + "=" + first})
	require.Equal(t, http.StatusOK, status)
	require.Contains(t, page, "Your operator's token", "the session before it is over")
	_, page = b.post("/logout")
	require.Contains(t, page, "Your operator's token")
	_, page = d.browser().do(http.MethodGet, "/", nil, map[string]string{"Cookie": cookie + "=" + second})
	require.Contains(t, page, "Your operator's token")
	require.NotContains(t, d.log.String(), second, "no session is in the log")
}

func TestCookieIsKeptFromScriptsAndOtherSites(t *testing.T) {
	t.Parallel()
	d := openDesk(t, behindProxy)
	for scheme, want := range map[string]string{
		"http":  "stampede-session=X; Path=/; Max-Age=43200; HttpOnly; SameSite=Strict",
		"https": "__Host-stampede-session=X; Path=/; Max-Age=43200; HttpOnly; Secure; SameSite=Strict",
	} {
		b := d.browser()
		b.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, d.url+"/login", strings.NewReader("token=ann"))
		require.NoError(t, err)
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		r.Header.Set("X-Forwarded-Proto", scheme)
		answer, err := b.Do(r)
		require.NoError(t, err)
		_ = answer.Body.Close()
		require.Equal(t, http.StatusSeeOther, answer.StatusCode)
		name, rest, _ := strings.Cut(answer.Header.Get("Set-Cookie"), "=")
		_, rest, _ = strings.Cut(rest, ";")
		require.Equal(t, want, name+"=X;"+rest)
	}
}

func behindProxy(c *Config) { c.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("127.0.0.1/32")} }

func TestLoginLeadsNowhereElse(t *testing.T) {
	t.Parallel()
	for next, want := range map[string]string{
		"":                        "/",
		"/audit?sale=1":           "/audit?sale=1",
		"//evil.example/x":        "/",
		"https://evil.example/":   "/",
		"/\\evil.example":         "/",
		"\\\\evil.example":        "/",
		"/%2fevil.example":        "/",
		"javascript:alert(1)":     "/",
		"/x\r\nSet-Cookie: a=b":   "/",
		"evil.example":            "/",
		"http:/evil.example":      "/",
		"/a/../..//evil.example/": "/a/../..//evil.example/",
	} {
		require.Equal(t, want, localPath(next), next)
	}
}

func TestLoginsAreLimited(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	b := d.browser()
	var status int
	for i := range loginBurst + 1 {
		status, _ = b.post("/login", "token", fmt.Sprint("guess-", i))
	}
	require.Equal(t, http.StatusTooManyRequests, status)
	status, page := b.post("/login", "token", "ann")
	require.Equal(t, http.StatusTooManyRequests, status, "the right token, too: else it could be guessed")
	require.Contains(t, page, "Too many logins")
	require.Empty(t, b.cookie())
	require.EqualValues(t, loginBurst, testutil.ToFloat64(d.metrics.logins.WithLabelValues(loginRefused)))
	require.NotContains(t, d.log.String(), "guess-", "no token is in the log")
}

// Guesses of one client behind a proxy that writes ports lock nobody else out, nor do those of many clients.
func TestLoginsAreLimitedByAddressBehindProxy(t *testing.T) {
	t.Parallel()
	d := openDesk(t, behindProxy)
	login := func(from, token string) int {
		status, _ := d.browser().do(http.MethodPost, "/login", strings.NewReader("token="+token),
			map[string]string{"Content-Type": "application/x-www-form-urlencoded", "X-Forwarded-For": from})
		return status
	}
	for i := range loginBurst {
		require.Equal(t, http.StatusUnauthorized, login(fmt.Sprint("203.0.113.5:", 50000+i), "guess"))
	}
	require.Equal(t, http.StatusTooManyRequests, login("203.0.113.5:1", "ann"))
	for i := range 100 {
		require.Equal(t, http.StatusUnauthorized, login(fmt.Sprint("192.0.2.", i), "guess"))
	}
	require.Equal(t, http.StatusOK, login("203.0.113.5, 198.51.100.7:50002", "ann"), "the redirection was followed")
}

func TestForeignFormsAreRefused(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	id := d.sale("drop", 5)
	b := d.as("ada")
	for _, headers := range []map[string]string{
		{"Origin": "https://evil.example"},
		{"Origin": "null"},
		{"Sec-Fetch-Site": "cross-site"},
		{"Sec-Fetch-Site": "same-site"},
		{"Sec-Fetch-Site": "cross-site", "Origin": d.url},
	} {
		headers["Content-Type"] = "application/x-www-form-urlencoded"
		for _, path := range []string{"/sales/" + id.String() + "/pause", "/login", "/logout"} {
			status, page := b.do(http.MethodPost, path, strings.NewReader("token=ada"), headers)
			require.Equal(t, http.StatusForbidden, status, "%v", headers)
			require.Contains(t, page, "another origin")
		}
	}
	require.EqualValues(t, "open", d.shown(id).State)
	_, page := b.get("/")
	require.Contains(t, page, "Log out")
}

// A name of another domain that leads to this machine is not this dashboard.
func TestForeignHostIsRefused(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	for host, want := range map[string]int{
		"evil.example:8090": http.StatusMisdirectedRequest, "evil.example": http.StatusMisdirectedRequest,
		"localhost:8090": http.StatusOK, "127.0.0.1": http.StatusOK, "[::1]:8090": http.StatusOK,
	} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, d.url+"/login", nil)
		require.NoError(t, err)
		r.Host = host
		answer, err := d.browser().Do(r)
		require.NoError(t, err)
		_ = answer.Body.Close()
		require.Equal(t, want, answer.StatusCode, host)
	}
}

func TestHeadersOfEveryAnswer(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	b := d.as("ann")
	for _, path := range []string{
		"/", "/login", "/none", "/live?x", "/history?of=all", "/assets/desk.css", "/assets/none", "/livez",
	} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodHead, d.url+path, nil)
		require.NoError(t, err)
		if path == "/live?x" {
			r.Method = http.MethodGet
			r.Header.Set("Cookie", cookie+"=none")
			b = d.browser()
		}
		answer, err := b.Do(r)
		require.NoError(t, err)
		_ = answer.Body.Close()
		require.Contains(t, answer.Header.Get("Content-Security-Policy"), "default-src 'none'", path)
		require.NotContains(t, answer.Header.Get("Content-Security-Policy"), "unsafe", path)
		require.Contains(t, answer.Header.Get("Content-Security-Policy"), "frame-ancestors 'none'", path)
		require.Equal(t, "nosniff", answer.Header.Get("X-Content-Type-Options"), path)
		require.Equal(t, "no-store", answer.Header.Get("Cache-Control"), path)
	}
}

func TestHugeFormIsRefused(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	b := d.as("ada")
	for _, path := range []string{"/letters", "/audit/run", "/orders/" + d.sale("x", 1).String() + "/cancel"} {
		status, page := b.post(path, "reason", strings.Repeat("x", 2*maxFormBytes))
		require.Equal(t, http.StatusBadRequest, status)
		require.Contains(t, page, "too large")
	}
	status, _ := d.browser().post("/login", "token", strings.Repeat("x", 2*maxFormBytes))
	require.Equal(t, http.StatusBadRequest, status)
}
