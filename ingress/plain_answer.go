package ingress

import (
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"stampede/internal/accept"
)

// plainAnswer is the http.ResponseWriter of a plain purchase. It holds the answer until the handler is done.
type plainAnswer struct {
	arrival accept.Arrival // of the request
	header  http.Header
	status  int
	body    []byte
}

func (a *plainAnswer) Header() http.Header { return a.header }

func (a *plainAnswer) WriteHeader(status int) { a.status = status }

func (a *plainAnswer) Write(body []byte) (int, error) {
	a.body = append(a.body, body...)
	return len(body), nil
}

func (a *plainAnswer) reset(arrival accept.Arrival) {
	a.arrival = arrival
	clear(a.header)
	a.status, a.body = http.StatusOK, a.body[:0]
}

// closes reports whether the connection ends behind this answer.
func (a *plainAnswer) closes() bool { return a.header["Connection"] != nil }

// append appends the answer as net/http would send it. No part of a header comes from a client.
func (a *plainAnswer) append(dst []byte, now time.Time) []byte {
	dst = append(dst, "HTTP/1.1 "...)
	dst = strconv.AppendInt(dst, int64(a.status), 10)
	dst = append(dst, ' ')
	dst = append(dst, http.StatusText(a.status)...)
	for name, values := range a.header {
		for _, value := range values {
			dst = append(dst, "\r\n"...)
			dst = append(dst, name...)
			dst = append(dst, ": "...)
			dst = append(dst, value...)
		}
	}
	dst = append(dst, "\r\nDate: "...)
	dst = append(dst, httpDate(now)...)
	dst = append(dst, "\r\nContent-Length: "...)
	dst = strconv.AppendInt(dst, int64(len(a.body)), 10)
	dst = append(dst, "\r\n\r\n"...)
	return append(dst, a.body...)
}

// dateLine is a second as HTTP writes it.
type dateLine struct {
	second int64
	text   string
}

var lastDate atomic.Pointer[dateLine]

// httpDate formats a time once for all answers of its second.
func httpDate(now time.Time) string {
	if last := lastDate.Load(); last != nil && last.second == now.Unix() {
		return last.text
	}
	made := &dateLine{now.Unix(), now.UTC().Format(http.TimeFormat)}
	lastDate.Store(made)
	return made.text
}
