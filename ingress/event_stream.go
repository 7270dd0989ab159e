package ingress

import (
	"net/http"
	"strconv"
	"time"

	"github.com/labstack/echo/v4"
)

const (
	// heartbeatEvery is how often a stream says something though there is nothing to say, so that proxies keep the
	// connection and both ends notice when the other one is gone.
	heartbeatEvery = 15 * time.Second
	// eventTimeout is for how long a client may leave an event in the socket before it is cut off.
	eventTimeout = 10 * time.Second
)

var (
	eventContent     = []string{"text/event-stream"}
	noBuffering      = []string{"no"}
	heartbeatComment = []byte(": \n\n")
)

// eventStream is an answer of server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html).
type eventStream struct {
	response   *echo.Response
	connection *http.ResponseController
	heartbeats *time.Ticker
	buf        []byte
}

// openStream begins the answer, and sends its head: it may be long until there is something to tell. The caller closes the stream.
func openStream(c echo.Context) *eventStream {
	response := c.Response()
	h := response.Header()
	h["Content-Type"] = eventContent
	h["Cache-Control"] = noStore
	h["X-Accel-Buffering"] = noBuffering // nginx would hold events back
	response.WriteHeader(http.StatusOK)
	e := &eventStream{response: response, connection: http.NewResponseController(response), heartbeats: time.NewTicker(heartbeatEvery)}
	_ = e.write(nil) // a client that is gone is found out by the next one
	return e
}

func (e *eventStream) close() { e.heartbeats.Stop() }

// send sends an event. The id is left out if it is 0; data is JSON, without line ends. An error means that the client
// is gone, or takes nothing any more.
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
	// In place of the server's writeTimeout. An error means that the connection has none.
	_ = e.connection.SetWriteDeadline(time.Now().Add(eventTimeout))
	if _, err := e.response.Write(text); err != nil {
		return err
	}
	return e.connection.Flush()
}
