package ingress

import (
	"bytes"
	"errors"
	"io"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"sync"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"github.com/labstack/echo/v4"

	"stampede/internal/accept"
	"stampede/reservation/order"
	"stampede/reservation/problems"
)

// readObject reads the body of a request into a struct.
func readObject(c echo.Context, into any) error {
	buf := scratchPool.Get().(*scratch)
	defer scratchPool.Put(buf)
	body, err := buf.readBody(c.Request())
	switch {
	case err != nil:
		return err
	case arrived(c).IsLate(): // its end came later than its head
		return problemOverloaded
	}
	return decodeStrict(body, into)
}

// readEmptyObject reads the body of a request without members: none, or an empty object.
func readEmptyObject(c echo.Context) error {
	buf := scratchPool.Get().(*scratch)
	defer scratchPool.Put(buf)
	body, err := buf.readBody(c.Request())
	if err != nil || len(body) == 0 {
		return err
	}
	return decodeStrict(body, &struct{}{})
}

var (
	problemQuantity = fixed(problem{
		Kind: problems.Invalid, detail: "quantity must be a whole number, 1 or more, in digits only.",
	})

	quantityStart = []byte(`{"quantity":`)
)

// readQuantity reads the body of a purchase.
func readQuantity(r *http.Request) (int64, error) {
	buf := scratchPool.Get().(*scratch)
	defer scratchPool.Put(buf)
	body, err := buf.readBody(r)
	if err != nil {
		return 0, err
	}
	return parseQuantity(body)
}

// parseQuantity reads how many units a body requests; an empty body requests one. It parses the usual form
// without the strict decoder, in a tenth of its time; the decoder gets everything else.
func parseQuantity(body []byte) (int64, error) {
	if len(body) == 0 {
		return 1, nil
	}
	if rest, ok := bytes.CutPrefix(body, quantityStart); ok {
		digits := bytes.TrimPrefix(bytes.TrimSuffix(rest, []byte{'}'}), []byte{' '})
		if len(rest) > 0 && rest[len(rest)-1] == '}' && isPositiveInteger(digits) {
			return clampQuantity(digits), nil
		}
	}
	var wanted struct {
		Quantity jsontext.Value `json:"quantity"`
	}
	if err := decodeStrict(body, &wanted); err != nil {
		return 0, err
	}
	switch {
	case wanted.Quantity == nil:
		return 1, nil
	case !isPositiveInteger(wanted.Quantity):
		return 0, problemQuantity
	}
	return clampQuantity(wanted.Quantity), nil
}

// isPositiveInteger accepts a positive JSON number without sign, fraction or exponent.
func isPositiveInteger(digits []byte) bool {
	if len(digits) == 0 || digits[0] == '0' {
		return false
	}
	for _, c := range digits {
		if c < '0' || c > '9' {
			return false
		}
	}
	return true
}

// clampQuantity makes every number above the highest limit of any sale the same one. It is over the limit in
// every sale, and small enough for the script, whose numbers are doubles: 2^53+1 would not be.
func clampQuantity(digits []byte) int64 {
	const most = order.MaxPerOrder + 1
	var n int64
	for _, c := range digits {
		if n = n*10 + int64(c-'0'); n > most {
			return most
		}
	}
	return n
}

// scratch has the buffers of a request and its answer.
type scratch struct {
	// body has room for one byte more than is allowed, by which a body is found to be too large.
	body [accept.MaxBodyBytes + 1]byte
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
	case n > accept.MaxBodyBytes:
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
