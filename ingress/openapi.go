package ingress

import (
	_ "embed"
	"net/http"
	"strings"
	"sync"

	"github.com/labstack/echo/v4"

	"stampede/ingress/apidoc"
)

// openapi describes this API. Tests hold it against every answer that they receive, and against the routes.
//
//go:embed openapi.yaml
var openapi []byte

// documents makes the pages once for all servers of a process: that costs 50 ms of CPU.
var documents = sync.OnceValues(func() (*apidoc.Site, error) { return apidoc.New(openapi) })

// pageHeaders are the headers of all pages.
func pageHeaders() http.Header {
	return http.Header{"Cache-Control": {"public, max-age=300"}, "X-Content-Type-Options": {"nosniff"}}
}

// showPage serves a page that was made at the start.
func showPage(page apidoc.Page, headers http.Header) echo.HandlerFunc {
	return func(c echo.Context) error {
		return writeTagged(c, headers, page.ETag, page.ContentType, page.Body)
	}
}

// showProblem serves GET /problems/{slug}: for people, or as JSON for programs that ask for it.
func showProblem(site *apidoc.Site) echo.HandlerFunc {
	plain, html := pageHeaders(), pageHeaders()
	html.Set("Content-Security-Policy", site.ContentSecurityPolicy)
	people, programs := map[string]echo.HandlerFunc{}, map[string]echo.HandlerFunc{}
	for slug, page := range site.ProblemPages {
		people[slug], programs[slug] = showPage(page, html), showPage(site.ProblemJSON[slug], plain)
	}
	return func(c echo.Context) error {
		c.Response().Header().Add("Vary", "Accept")
		answers := people
		if wantsJSON(c.Request().Header) {
			answers = programs
		}
		if answer, known := answers[c.Param("slug")]; known {
			return answer(c)
		}
		return problemNoSuchProblem
	}
}

// wantsJSON reports whether Accept names JSON and no page.
func wantsJSON(h http.Header) bool {
	accept := strings.ToLower(strings.Join(h["Accept"], ","))
	return !strings.Contains(accept, "text/html") &&
		(strings.Contains(accept, "application/json") || strings.Contains(accept, "application/problem+json"))
}
