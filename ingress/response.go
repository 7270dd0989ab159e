package ingress

import (
	"maps"
	"net/http"
	"strconv"

	"github.com/go-json-experiment/json"
	"github.com/labstack/echo/v4"
)

// Header values that are the same in every answer. They must not be changed.
var (
	noStore         = []string{"no-store"}
	jsonContent     = []string{"application/json"}
	problemContent  = []string{"application/problem+json"}
	closeConnection = []string{"close"}
	headerTrue      = []string{"true"}
)

func writeProblem(c echo.Context, p *problem) {
	h := c.Response().Header()
	h["Content-Type"] = problemContent
	if p.location != "" {
		h["Location"] = []string{p.location}
	}
	if p.challenge != "" {
		h["Www-Authenticate"] = []string{p.challenge}
	}
	if p.retryAfter != 0 {
		h["Retry-After"] = []string{strconv.Itoa(p.retryAfter)}
	}
	if p.closes {
		h["Connection"] = closeConnection
	}
	body := p.body
	if body == nil {
		body = p.appendJSON(nil)
	}
	write(c, p.status, body)
}

// write sends the answer. An error means that the client has left.
func write(c echo.Context, status int, body []byte) {
	res := c.Response()
	res.WriteHeader(status)
	_, _ = res.Write(body)
}

// writeJSON answers with v.
func writeJSON(c echo.Context, status int, v any) error {
	body, err := marshalLine(v)
	if err != nil {
		return err
	}
	c.Response().Header()["Content-Type"] = jsonContent
	write(c, status, body)
	return nil
}

// writeTagged answers with a representation that has an entity tag, unless the client has it. If-Match comes before
// If-None-Match (RFC 9110, section 13.2.2). The other preconditions are about dates, which no answer has.
func writeTagged(c echo.Context, headers http.Header, etag, contentType string, body []byte) error {
	asked := c.Request().Header
	if tags := asked["If-Match"]; tags != nil && !matchesStrongly(tags, etag) {
		return problemPrecondition
	}
	h := c.Response().Header()
	maps.Copy(h, headers)
	h["Etag"] = []string{etag}
	if matchesWeakly(asked["If-None-Match"], etag) {
		c.Response().WriteHeader(http.StatusNotModified)
		return nil
	}
	h["Content-Type"] = []string{contentType}
	h["Content-Length"] = []string{strconv.Itoa(len(body))} // net/http would send a long body in chunks
	write(c, http.StatusOK, body)
	return nil
}

// marshalLine returns v as one line of JSON, like every answer. The most frequent answers are written without it:
// see appendReservation and problem.appendJSON.
func marshalLine(v any) ([]byte, error) {
	body, err := json.Marshal(v)
	return append(body, '\n'), err
}
