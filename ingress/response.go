package ingress

import (
	"fmt"
	"maps"
	"net/http"
	"strconv"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/labstack/echo/v4"

	"stampede/internal/accept"
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
	if p.body != nil {
		write(c, p.Status, p.body)
		return
	}
	buf := scratchPool.Get().(*scratch)
	defer scratchPool.Put(buf)
	buf.out = p.appendJSON(buf.out[:0])
	write(c, p.Status, buf.out)
}

// refusal returns the answer to a request that net/http refuses, as it is sent; nil for one of which no problem tells.
func refusal(status int) []byte {
	p := problemNotHTTP
	switch status {
	case http.StatusBadRequest:
	case http.StatusRequestHeaderFieldsTooLarge:
		p = problemHeadTooLarge
	default:
		return nil
	}
	return fmt.Appendf(nil, "HTTP/1.1 %d %s\r\nContent-Type: %s\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s",
		status, http.StatusText(status), problemContent[0], len(p.body), p.body)
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

// writeTagged answers with a representation that has an entity tag, unless the client has it.
func writeTagged(c echo.Context, headers http.Header, etag, contentType string, body []byte) error {
	if isKnown, err := checkTag(c, headers, etag); err != nil || isKnown {
		return err
	}
	h := c.Response().Header()
	h["Content-Type"] = []string{contentType}
	h["Content-Length"] = []string{strconv.Itoa(len(body))} // net/http would send a long body in chunks
	write(c, http.StatusOK, body)
	return nil
}

// checkTag begins the answer with a representation that has an entity tag. If the client has it, that is the answer.
// If-Match comes before If-None-Match (RFC 9110, section 13.2.2). The other preconditions are about dates, which no
// answer has.
func checkTag(c echo.Context, headers http.Header, etag string) (isKnown bool, err error) {
	asked := c.Request().Header
	if tags := asked["If-Match"]; tags != nil && !matchesStrongly(tags, etag) {
		return false, problemPrecondition
	}
	h := c.Response().Header()
	maps.Copy(h, headers)
	h["Etag"] = []string{etag}
	if matchesWeakly(asked["If-None-Match"], etag) {
		c.Response().WriteHeader(http.StatusNotModified)
		return true, nil
	}
	return false, nil
}

// marshalLine returns v as one line of JSON, like every answer. The most frequent answers are written without it:
// see appendReservation and problem.appendJSON.
func marshalLine(v any) ([]byte, error) {
	body, err := json.Marshal(v)
	return append(body, '\n'), err
}

const (
	// heartbeatInterval is the pause between comments, which keep proxies from closing an idle stream, and by which
	// each end notices that the other is gone.
	heartbeatInterval = 15 * time.Second
	// eventTimeout bounds how long an event may take to write, before a client that does not read is cut off.
	eventTimeout = 10 * time.Second
)

var (
	heartbeatComment = []byte(": \n\n")
	// retryField has clients reconnect after two seconds. Browsers differ in what they do without it.
	retryField = []byte("retry: 2000\n\n")
)

// eventStream is an answer of server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html).
type eventStream struct {
	response   *echo.Response
	connection *http.ResponseController
	heartbeats *time.Ticker
	buf        []byte
}

// openStream sends the head of the answer immediately, because the first event may come late. The caller closes
// the stream.
func openStream(c echo.Context) *eventStream {
	response := c.Response()
	accept.EventStream(response.Header())
	response.WriteHeader(http.StatusOK)
	e := &eventStream{
		response: response, connection: http.NewResponseController(response), heartbeats: time.NewTicker(heartbeatInterval),
	}
	_ = e.write(retryField) // if the client has left, the next write fails too
	return e
}

func (e *eventStream) close() { e.heartbeats.Stop() }

// send sends an event. It leaves an id of 0 out; data is JSON without line ends. An error means that the client
// has left or does not read.
func (e *eventStream) send(event string, id int, data []byte) error {
	e.buf = append(append(e.buf[:0], "event: "...), event...)
	if id != 0 {
		e.buf = strconv.AppendInt(append(e.buf, "\nid: "...), int64(id), 10)
	}
	e.buf = append(append(e.buf, "\ndata: "...), data...)
	return e.write(append(e.buf, "\n\n"...))
}

func (e *eventStream) sendHeartbeat() error { return e.write(heartbeatComment) }

func (e *eventStream) write(text []byte) error {
	// Replaces the server's accept.WriteTimeout. It fails if the connection has no deadlines.
	_ = e.connection.SetWriteDeadline(time.Now().Add(eventTimeout))
	if _, err := e.response.Write(text); err != nil {
		return err
	}
	return e.connection.Flush()
}
