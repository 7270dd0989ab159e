package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"
)

const bodyMax = 1 << 20

// fault is what happens to one request.
type fault struct {
	// On is a method and a part of the path, as in "POST /orders"; empty is any request.
	On string `json:"on"`
	// Do is one of:
	//   refuse: the connection is closed before the server sees the request
	//   drop: the server answers, and the connection is closed in place of its answer
	//   hold: the server answers, and its answer is held back until the client leaves
	//   answer: the proxy answers with Status, Headers and Body; the server does not see the request
	//   cut: the answer of the server is passed on and cut in the middle of event number Events + 1
	//   silence: the same, but nothing comes any more in place of the cut
	Do      string            `json:"do"`
	Status  int               `json:"status"`
	Headers map[string]string `json:"headers"`
	Body    string            `json:"body"`
	Events  int               `json:"events"`
}

func (f fault) matches(r *http.Request, path string) bool {
	method, part, _ := strings.Cut(f.On, " ")
	return f.On == "" || r.Method == method && strings.Contains(path, part)
}

// seen is a request as the proxy got it.
type seen struct {
	Method  string            `json:"method"`
	Path    string            `json:"path"` // with its query
	Headers map[string]string `json:"headers"`
	Body    string            `json:"body"`
	AtMs    int64             `json:"at_ms"`
	Fault   string            `json:"fault,omitempty"`
	Status  int               `json:"status,omitempty"` // of the server's answer
}

// plan holds the faults for the requests below /PLAN/, each of which happens once, and all requests.
type plan struct {
	faults []fault
	seen   []*seen
}

// proxy passes requests below /PLAN/ on to a server, with the faults of that plan. PUT /_plans/PLAN sets them; GET
// returns the requests so far.
type proxy struct {
	target string
	client *http.Client
	began  time.Time

	mu    sync.Mutex
	plans map[string]*plan
}

func newProxy(target string) *proxy {
	return &proxy{
		target: target, began: time.Now(), plans: map[string]*plan{},
		client: &http.Client{Transport: &http.Transport{DisableCompression: true, DisableKeepAlives: true}},
	}
}

func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	name, path, _ := strings.Cut(strings.TrimPrefix(r.URL.RequestURI(), "/"), "/")
	if name == "_plans" {
		p.control(w, r, path)
		return
	}
	path = "/" + path
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, bodyMax))
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	f, log := p.next(name, path, string(body), r)
	switch f.Do {
	case "refuse":
		panic(http.ErrAbortHandler)
	case "answer":
		for name, value := range f.Headers {
			w.Header().Set(name, value)
		}
		w.WriteHeader(f.Status)
		_, _ = io.WriteString(w, f.Body)
		return
	}
	request, err := http.NewRequestWithContext(r.Context(), r.Method, p.target+path, bytes.NewReader(body))
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	request.Header = r.Header.Clone()
	answer, err := p.client.Do(request)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	defer func() { _ = answer.Body.Close() }()
	p.mu.Lock()
	log.Status = answer.StatusCode
	p.mu.Unlock()
	switch f.Do {
	case "drop", "hold":
		_, _ = io.Copy(io.Discard, answer.Body)
		if f.Do == "hold" {
			<-r.Context().Done()
		}
		panic(http.ErrAbortHandler)
	}
	for name, values := range answer.Header {
		w.Header()[name] = values
	}
	w.WriteHeader(answer.StatusCode)
	pass(w, r, answer.Body, f)
}

// pass copies the server's answer as it comes, up to the end that the fault sets.
func pass(w http.ResponseWriter, r *http.Request, from io.Reader, f fault) {
	flush := http.NewResponseController(w).Flush
	_ = flush()
	dataField, events := []byte("\ndata: "), 0
	buf := make([]byte, 4096)
	for {
		n, err := from.Read(buf)
		part := buf[:n]
		if f.Do == "cut" || f.Do == "silence" {
			// The server flushes each event by itself.
			if events += bytes.Count(part, dataField); events > f.Events {
				_, _ = w.Write(part[:n/2])
				_ = flush()
				if f.Do == "silence" {
					<-r.Context().Done()
				}
				panic(http.ErrAbortHandler)
			}
		}
		if _, failed := w.Write(part); failed != nil || flush() != nil {
			return
		}
		if err == io.EOF {
			return
		}
		if err != nil {
			panic(http.ErrAbortHandler)
		}
	}
}

// next takes the fault for a request, if there is one, and logs the request.
func (p *proxy) next(name, path, body string, r *http.Request) (fault, *seen) {
	log := &seen{
		Method: r.Method, Path: path, Body: body, Headers: map[string]string{}, AtMs: time.Since(p.began).Milliseconds(),
	}
	for name, values := range r.Header {
		log.Headers[strings.ToLower(name)] = strings.Join(values, ", ")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	current := p.plan(name)
	current.seen = append(current.seen, log)
	for i, f := range current.faults {
		if f.matches(r, path) {
			current.faults = append(current.faults[:i:i], current.faults[i+1:]...)
			log.Fault = f.Do
			return f, log
		}
	}
	return fault{}, log
}

// plan returns the plan with this name; p.mu is held.
func (p *proxy) plan(name string) *plan {
	if p.plans[name] == nil {
		p.plans[name] = &plan{seen: []*seen{}}
	}
	return p.plans[name]
}

func (p *proxy) control(w http.ResponseWriter, r *http.Request, name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	current := p.plan(name)
	if r.Method == http.MethodPut {
		var faults []fault
		if err := json.NewDecoder(io.LimitReader(r.Body, bodyMax)).Decode(&faults); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		current.faults = faults
		w.WriteHeader(http.StatusNoContent)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(current.seen)
}
