package ingress

import (
	"errors"
	"io"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"sync"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"stampede/internal/accept"
)

// readObject reads the body of a request into a struct.
func readObject(r *http.Request, into any) error {
	buf := scratchPool.Get().(*scratch)
	defer scratchPool.Put(buf)
	body, err := buf.readBody(r)
	switch {
	case err != nil:
		return err
	case accept.ArrivalOf(r).IsLate(): // its end came later than its head
		return problemOverloaded
	}
	return decodeStrict(body, into)
}

// readEmptyObject reads the body of a request without members: none, or an empty object.
func readEmptyObject(r *http.Request) error {
	buf := scratchPool.Get().(*scratch)
	defer scratchPool.Put(buf)
	body, err := buf.readBody(r)
	if err != nil || len(body) == 0 {
		return err
	}
	return decodeStrict(body, &struct{}{})
}

// scratch has the buffers of a request and its answer.
type scratch struct {
	// body has room for one byte more than is allowed, by which a body is found to be too large.
	body [maxBodyBytes + 1]byte
	out  []byte
}

var scratchPool = sync.Pool{New: func() any { return &scratch{out: make([]byte, 0, 512)} }}

// readBody reads the body of a request, which must be JSON unless it is empty. The bytes belong to scratch.
func (s *scratch) readBody(r *http.Request) ([]byte, error) {
	if r.ContentLength == 0 {
		return nil, nil
	}
	n, err := 0, error(nil)
	for err == nil && n < len(s.body) {
		var more int
		more, err = r.Body.Read(s.body[n:])
		n += more
	}
	switch {
	case n > maxBodyBytes:
		return nil, problemTooLarge
	case err != io.EOF: //nolint:errorlint // io.ErrUnexpectedEOF, a body that broke off, is another error
		return nil, problemBodyBroken
	case n == 0:
		return nil, nil
	case !isJSON(r.Header):
		return nil, problemMediaType
	}
	return s.body[:n], nil
}

// isJSON reports whether the headers announce application/json in UTF-8.
func isJSON(h http.Header) bool {
	if _, encoded := h["Content-Encoding"]; encoded {
		return false
	}
	v := h["Content-Type"]
	if len(v) != 1 {
		return false
	}
	if v[0] == "application/json" {
		return true
	}
	media, params, err := mime.ParseMediaType(v[0])
	charset, given := params["charset"]
	return err == nil && media == "application/json" && (!given || strings.EqualFold(charset, "utf-8"))
}

// decodeStrict decodes one object, whose members are known, spelled exactly, and not repeated. encoding/json would
// accept members that are repeated or spelled in another case.
func decodeStrict(body []byte, into any) error {
	if jsontext.Value(body).Kind() != '{' {
		return invalid("The body must be a JSON object.")
	}
	err := json.Unmarshal(body, into, json.RejectUnknownMembers(true))
	if err == nil {
		return nil
	}
	var (
		grammar *jsontext.SyntacticError
		meaning *json.SemanticError
	)
	switch {
	case errors.As(err, &grammar) && errors.Is(err, jsontext.ErrDuplicateName):
		return invalid(member(grammar.JSONPointer) + " is given twice.")
	case errors.As(err, &grammar):
		at := strconv.FormatInt(grammar.ByteOffset, 10) + inside(grammar.JSONPointer)
		return invalid("The body is not valid JSON: see byte " + at + ".")
	case errors.As(err, &meaning) && errors.Is(err, json.ErrUnknownName):
		return invalid(member(meaning.JSONPointer) + " is not a known member; names are case-sensitive.")
	case errors.As(err, &meaning):
		return invalid(member(meaning.JSONPointer) + " has the wrong type, or is out of range.")
	}
	return invalid("The body is not valid JSON.")
}

// member returns the last name in a pointer.
func member(p jsontext.Pointer) string { return truncate(p.LastToken()) }

// truncate shortens a name that an answer repeats to its client.
func truncate(name string) string {
	const most = 64
	if len(name) > most {
		name = name[:most] + "…"
	}
	return name
}

func inside(p jsontext.Pointer) string {
	if p == "" {
		return ""
	}
	return ", in " + member(p)
}
