package ingress

import (
	_ "embed"
	"net/http"
	"strings"

	"github.com/labstack/echo/v4"

	"stampede/ingress/apidoc"
)

// openapi describes this API. Tests hold it against every answer that they receive, and against the routes.
//
//go:embed openapi.yaml
var openapi []byte

var (
	publicMinutes = []string{"public, max-age=300"}
	nosniff       = []string{"nosniff"}
)

// showPage serves a page that was made at the start.
func (s *Server) showPage(page apidoc.Page) echo.HandlerFunc {
	return func(c echo.Context) error {
		h := c.Response().Header()
		h["X-Content-Type-Options"] = nosniff
		if page.ContentType == apidoc.HTMLType {
			h["Content-Security-Policy"] = s.pagePolicy
		}
		return writeTagged(c, publicMinutes, page.ETag, page.ContentType, page.Body)
	}
}

// showProblem serves GET /problems/{slug}: for people, or as JSON for programs that ask for it.
func (s *Server) showProblem(site *apidoc.Site) echo.HandlerFunc {
	answers := make(map[string][2]echo.HandlerFunc, len(site.ProblemPages))
	for slug, page := range site.ProblemPages {
		answers[slug] = [2]echo.HandlerFunc{s.showPage(page), s.showPage(site.ProblemJSON[slug])}
	}
	return func(c echo.Context) error {
		answer, known := answers[c.Param("slug")]
		if !known {
			return problemNoSuchProblem
		}
		c.Response().Header().Add("Vary", "Accept")
		if wantsJSON(c.Request().Header) {
			return answer[1](c)
		}
		return answer[0](c)
	}
}

// wantsJSON reports whether Accept names JSON and no page.
func wantsJSON(h http.Header) bool {
	accept := strings.ToLower(strings.Join(h["Accept"], ","))
	return !strings.Contains(accept, "text/html") &&
		(strings.Contains(accept, "application/json") || strings.Contains(accept, "application/problem+json"))
}

// documentation registers the pages. They come from memory, like sales, and have the limits of these.
func (s *Server) documentation() error {
	site, err := apidoc.New(openapi)
	if err != nil {
		return err
	}
	s.pagePolicy = []string{site.ContentSecurityPolicy}
	show := func(path string, h echo.HandlerFunc) {
		s.handleGet(path, s.limits.limitAddress(s.yieldToBuyers(s.inFlight.sales.admit(h))))
	}
	show("/openapi.yaml", s.showPage(site.YAML))
	show("/openapi.json", s.showPage(site.JSON))
	show("/docs", s.showPage(site.Docs))
	show("/problems", s.showPage(site.Problems))
	show("/problems/:slug", s.showProblem(site))
	return nil
}
