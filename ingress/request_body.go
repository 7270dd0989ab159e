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
	"stampede/ledger/problems"
	"stampede/reservation/order"
)

// readObject reads the body of a request into a struct. Its route says how long it may be.
func readObject(c echo.Context, into any) error {
	if bound, ok := c.Get(bodyKey).(*bodyBound); ok {
		return readObjectIn(c, make([]byte, bound.bytes+1), bound.tooLarge, into)
	}
	buf := scratchPool.Get().(*scratch)
	defer scratchPool.Put(buf)
	return readObjectIn(c, buf.body[:], problemTooLarge, into)
}

// readObjectIn is readObject with a buffer for the body, which has room for one byte more than is allowed.
func readObjectIn(c echo.Context, buf []byte, tooLarge *problem, into any) error {
	body, err := readBody(c.Request(), buf, tooLarge)
	switch {
	case err != nil:
		return err
	case arrived(c).IsLate(): // its end came later than its head
		return problemOverloaded
	}
	return decodeStrict(body, into)
}

// readEmptyObject reads the body of a request without members: none, or an empty object.
func readEmptyObject(c echo.Context) error { return readObjectIfAny(c, &struct{}{}) }

// readObjectIfAny is readObject for a body that may be left out.
func readObjectIfAny(c echo.Context, into any) error {
	buf := scratchPool.Get().(*scratch)
	defer scratchPool.Put(buf)
	body, err := readBody(c.Request(), buf.body[:], problemTooLarge)
	if err != nil || len(body) == 0 {
		return err
	}
	return decodeStrict(body, into)
}

var (
	problemQuantity = fixed(problem{
		Kind: problems.Invalid, detail: "quantity must be a whole number, 1 or more, in digits only.",
	})

	problemItems = fixed(problem{
		Kind: problems.Invalid, detail: "items must be an object of 1 to " + strconv.Itoa(order.MaxItems) +
			" codes, each with a whole number, 1 or more, in digits only.",
	})
	problemQuantityAndItems = fixed(problem{
		Kind: problems.Invalid, detail: "quantity must be left out if there are items.",
	})

	quantityStart = []byte(`{"quantity":`)
	itemsStart    = []byte(`{"items":{`)
)

// readUnits reads the body of a purchase.
func readUnits(r *http.Request) (quantity int64, items map[string]int64, err error) {
	buf := scratchPool.Get().(*scratch)
	defer scratchPool.Put(buf)
	body, err := readBody(r, buf.body[:], problemTooLarge)
	if err != nil {
		return 0, nil, err
	}
	return parseUnits(body)
}

// parseUnits reads how many units a body requests, of which items if it names some; an empty body requests one. It
// parses the usual forms without the strict decoder, in a tenth of its time; the decoder gets everything else.
func parseUnits(body []byte) (quantity int64, items map[string]int64, err error) {
	if len(body) == 0 {
		return 1, nil, nil
	}
	if rest, ok := bytes.CutPrefix(body, quantityStart); ok {
		digits := bytes.TrimPrefix(bytes.TrimSuffix(rest, []byte{'}'}), []byte{' '})
		if len(rest) > 0 && rest[len(rest)-1] == '}' && isPositiveInteger(digits) {
			return clampQuantity(digits), nil, nil
		}
	} else if items = parseItems(body); items != nil {
		return 0, items, nil
	}
	var wanted struct {
		Quantity jsontext.Value `json:"quantity"`
		Items    jsontext.Value `json:"items"`
	}
	if err := decodeStrict(body, &wanted); err != nil {
		return 0, nil, err
	}
	switch {
	case wanted.Quantity != nil && wanted.Items != nil:
		return 0, nil, problemQuantityAndItems
	case wanted.Items != nil:
		items, err = decodeItems(wanted.Items)
		return 0, items, err
	case wanted.Quantity == nil:
		return 1, nil, nil
	case !isPositiveInteger(wanted.Quantity):
		return 0, nil, problemQuantity
	}
	return clampQuantity(wanted.Quantity), nil, nil
}

// parseItems reads a body as clients usually write it, such as {"items":{"m":1,"l":2}}. It returns nil for any other.
func parseItems(body []byte) map[string]int64 {
	rest, ok := bytes.CutPrefix(body, itemsStart)
	if !ok {
		return nil
	}
	items := itemsPool.Get().(map[string]int64)
	for len(items) < order.MaxItems {
		name, after, _ := bytes.Cut(rest, []byte{':'})
		end := bytes.IndexAny(after, ",}")
		if len(name) < 2 || name[0] != '"' || name[len(name)-1] != '"' || end < 0 || !isPositiveInteger(after[:end]) {
			return nil
		}
		code := string(name[1 : len(name)-1])
		if items[code] > 0 || !order.IsItemCode(code) {
			return nil
		}
		items[code] = clampQuantity(after[:end])
		if string(after[end:]) == "}}" {
			return items
		}
		if after[end] != ',' {
			return nil
		}
		rest = after[end+1:]
	}
	return nil
}

// itemsPool has empty maps, which most of a crowd need only until they hear that an item is sold out.
var itemsPool = sync.Pool{New: func() any { return make(map[string]int64) }}

// decodeItems reads the units by code.
func decodeItems(text jsontext.Value) (map[string]int64, error) {
	var wanted map[string]jsontext.Value
	if err := json.Unmarshal(text, &wanted); err != nil || len(wanted) < 1 || len(wanted) > order.MaxItems {
		return nil, problemItems
	}
	items := make(map[string]int64, len(wanted))
	for code, units := range wanted {
		if code == "" || !isPositiveInteger(units) {
			return nil, problemItems
		}
		items[code] = clampQuantity(units)
	}
	return items, nil
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

// readBody reads the body of a request, which must be JSON unless it is empty, into buf. It is too large if it fills
// buf.
func readBody(r *http.Request, buf []byte, tooLarge *problem) ([]byte, error) {
	if r.ContentLength == 0 {
		return nil, nil
	}
	n, err := 0, error(nil)
	for err == nil && n < len(buf) {
		var more int
		more, err = r.Body.Read(buf[n:])
		n += more
	}
	switch {
	case n == len(buf):
		return nil, tooLarge
	case err != io.EOF: //nolint:errorlint // io.ErrUnexpectedEOF, a body that broke off, is another error
		return nil, problemBodyBroken
	case n == 0:
		return nil, nil
	case !isJSON(r.Header):
		return nil, problemMediaType
	}
	return buf[:n], nil
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

// member names a member, such as items[0].stock.
func member(p jsontext.Pointer) string {
	path := ""
	for name := range p.Tokens() {
		switch _, err := strconv.Atoi(name); {
		case path == "":
			path = name
		case err == nil:
			path += "[" + name + "]"
		default:
			path += "." + name
		}
	}
	return truncate(path)
}

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
