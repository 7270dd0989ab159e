package ingress

import (
	"net/http"
	"strconv"
	"time"

	"github.com/labstack/echo/v4"
)

const (
	// heartbeatInterval is the pause between comments, which keep proxies from closing an idle stream, and by which
	// each end notices that the other is gone.
	heartbeatInterval = 15 * time.Second
	// eventTimeout bounds how long an event may take to write, before a client that does not read is cut off.
	eventTimeout = 10 * time.Second
)

var (
	eventContent     = []string{"text/event-stream"}
	noBuffering      = []string{"no"}
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
	h := response.Header()
	h["Content-Type"] = eventContent
	h["Cache-Control"] = noStore
	h["X-Accel-Buffering"] = noBuffering // nginx would hold events back
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
	// Replaces the server's writeTimeout. It fails if the connection has no deadlines.
	_ = e.connection.SetWriteDeadline(time.Now().Add(eventTimeout))
	if _, err := e.response.Write(text); err != nil {
		return err
	}
	return e.connection.Flush()
}
