package ingress

import (
	"encoding/base64"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/ledger/problems"
	"stampede/reservation/order"
)

// parseID accepts an id in the form in which our answers write it, and none of the other forms of uuid.Parse
// (braces, urn:uuid:, no hyphens): a sale has one path.
func parseID(text string) (uuid.UUID, bool) {
	if len(text) != 36 {
		return uuid.Nil, false
	}
	id, err := uuid.Parse(text)
	return id, err == nil
}

// idempotencyKey returns the request's key, or "" if it has none. Drafts of the header make it a string of structured
// fields ("abc", RFC 9651), and most clients send it bare (abc): both are the same key. Other structured fields are
// refused: they would be keys of another meaning, and lists are what proxies make of a header that is sent twice.
func idempotencyKey(h http.Header) (string, error) {
	switch keys := h["Idempotency-Key"]; len(keys) {
	case 0:
		return "", nil
	case 1:
		key, ok := keys[0], false
		if strings.HasPrefix(key, `"`) {
			key, ok = unquote(key)
		} else {
			ok = isBareKey(key)
		}
		if !ok {
			return "", problemKeyForm
		}
		return key, order.ValidateIdempotencyKey(key)
	default:
		return "", invalid("Idempotency-Key must be sent once.")
	}
}

var problemKeyForm = fixed(problem{
	Kind: problems.Invalid,
	detail: `Idempotency-Key must be one key, bare or as a quoted string. A bare key has no quotes, backslashes, commas ` +
		`and semicolons, and does not begin with ":", "?", "@", "%" or "(".`,
})

// isBareKey reports whether a key without quotes is no structured field but a token, a number, or like one.
func isBareKey(key string) bool {
	if key != "" && strings.IndexByte(":?@%(", key[0]) >= 0 {
		return false
	}
	for _, c := range [...]byte{'"', '\\', ',', ';'} {
		if strings.IndexByte(key, c) >= 0 {
			return false
		}
	}
	return true
}

// unquote reads a string of structured fields (RFC 9651, section 4.2.5). It is false for anything else.
func unquote(text string) (string, bool) {
	if len(text) < 2 || text[0] != '"' || text[len(text)-1] != '"' {
		return "", false
	}
	inner := text[1 : len(text)-1]
	if !strings.ContainsAny(inner, `"\`) {
		return inner, true
	}
	var key strings.Builder
	for i := 0; i < len(inner); i++ {
		switch c := inner[i]; {
		case c == '"':
			return "", false
		case c == '\\':
			if i++; i == len(inner) || inner[i] != '"' && inner[i] != '\\' {
				return "", false
			}
			fallthrough
		default:
			_ = key.WriteByte(inner[i]) // never fails
		}
	}
	return key.String(), true
}

// waitMax bounds how long a purchase waits, whatever the client prefers.
const waitMax = 30 * time.Second

// preferredWait returns how long the client prefers to wait (RFC 7240, section 4.3): the first wait among its
// preferences. It is false if there is none, or if the first is not a number of seconds.
func preferredWait(headers []string) (time.Duration, bool) {
	for _, header := range headers {
		for header != "" {
			var preference string
			preference, header = cutUnquoted(header, ',')
			preference, _ = cutUnquoted(preference, ';') // parameters follow, and wait has none
			name, value := cutUnquoted(preference, '=')
			if strings.EqualFold(trimOWS(name), "wait") {
				return parseWait(trimOWS(value))
			}
		}
	}
	return 0, false
}

// parseWait reads a number of seconds, which may be quoted.
func parseWait(value string) (time.Duration, bool) {
	if len(value) > 1 && value[0] == '"' && value[len(value)-1] == '"' {
		value = value[1 : len(value)-1]
	}
	if value == "" {
		return 0, false
	}
	var wait time.Duration
	for i := range len(value) {
		if value[i] < '0' || value[i] > '9' {
			return 0, false
		}
		wait = min(10*wait+time.Duration(value[i]-'0')*time.Second, waitMax)
	}
	return wait, true
}

// lastEventID returns the version that a reconnecting client has, or 0.
func lastEventID(h http.Header) int {
	version, err := strconv.Atoi(h.Get("Last-Event-Id"))
	if err != nil || version < 0 {
		return 0
	}
	return version
}

// matchesWeakly reports whether If-None-Match names the tag (RFC 9110, section 13.1.2).
func matchesWeakly(headers []string, etag string) bool {
	return anyTag(headers, func(tag string) bool { return tag == "*" || strings.TrimPrefix(tag, "W/") == etag })
}

// matchesStrongly reports whether If-Match names the tag (RFC 9110, section 13.1.1): weak tags match nothing.
func matchesStrongly(headers []string, etag string) bool {
	return anyTag(headers, func(tag string) bool { return tag == "*" || tag == etag })
}

// anyTag is true if the predicate is, for an entity tag in the headers.
func anyTag(headers []string, is func(tag string) bool) bool {
	for _, header := range headers {
		for header != "" {
			var tag string
			if tag, header = cutUnquoted(header, ','); is(trimOWS(tag)) {
				return true
			}
		}
	}
	return false
}

// cutUnquoted cuts at the first separator outside of quotes, within which a backslash escapes.
func cutUnquoted(s string, separator byte) (before, after string) {
	quoted := false
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == '"':
			quoted = !quoted
		case quoted && c == '\\':
			i++
		case !quoted && c == separator:
			return s[:i], s[i+1:]
		}
	}
	return s, ""
}

func trimOWS(s string) string { return strings.Trim(s, " \t") }

// pageMax bounds the items of a page.
const pageMax = 100

// pageRequest is the part of a list that a request asks for.
type pageRequest struct {
	limit int
	// after is the last item of the previous page; zero asks for the first page.
	after uuid.UUID
}

// readPage reads the query of a list: limit, cursor and the given filters.
func readPage(
	c echo.Context, defaultLimit int, filters map[string]func(text string) error,
) (p pageRequest, err error) {
	p.limit = defaultLimit
	parameters := map[string]func(string) error{
		"limit":  limitParameter(&p.limit, pageMax),
		"cursor": func(text string) (err error) { p.after, err = parseCursor(text); return err },
	}
	maps.Copy(parameters, filters)
	err = readQuery(c, parameters)
	return p, err
}

// readQuery reads the parameters of a call, each at most once. It refuses others: if a misspelled cursor were ignored,
// the client would read the first page forever.
func readQuery(c echo.Context, parameters map[string]func(text string) error) error {
	query, err := url.ParseQuery(c.Request().URL.RawQuery)
	if err != nil {
		return invalid("The query of the URL is not valid.")
	}
	for name, values := range query {
		read, known := parameters[name]
		switch {
		case !known:
			takes := strings.Join(slices.Sorted(maps.Keys(parameters)), ", ")
			return &order.InvalidError{Field: truncate(name), Reason: "is not known; this call takes " + takes}
		case len(values) > 1:
			return &order.InvalidError{Field: name, Reason: "must be given once"}
		}
		if err := read(values[0]); err != nil {
			return err
		}
	}
	return nil
}

// limitParameter reads a limit into n, unless it is empty.
func limitParameter(n *int, most int) func(text string) error {
	return func(text string) error {
		if text == "" {
			return nil
		}
		given, err := strconv.Atoi(text)
		if err != nil || given < 1 || given > most {
			reason := "must be a whole number from 1 to " + strconv.Itoa(most)
			return &order.InvalidError{Field: "limit", Reason: reason}
		}
		*n = given
		return nil
	}
}

// parseIDFilter reads the id of what a list is about. An empty one is refused, like any other that is none: it may come
// from an empty variable of a client, which would get all.
func parseIDFilter(name, what, text string, into *uuid.UUID) error {
	id, ok := parseID(text)
	if !ok || id == uuid.Nil {
		return &order.InvalidError{Field: name, Reason: "must be the id of " + what}
	}
	*into = id
	return nil
}

var problemCursor = invalid(`cursor must be the "next_cursor" of another page.`)

// cursorAfter returns the cursor of the page after the item with this id. It is opaque to clients.
func cursorAfter(last uuid.UUID) string { return base64.RawURLEncoding.EncodeToString(last[:]) }

// parseCursor reads a cursor of cursorAfter; no cursor is the zero id.
func parseCursor(text string) (uuid.UUID, error) {
	if text == "" {
		return uuid.Nil, nil
	}
	var last uuid.UUID
	raw, err := base64.RawURLEncoding.DecodeString(text)
	if err == nil && len(raw) == len(last) {
		last = uuid.UUID(raw)
	}
	// Sales and orders have ids of version 7. Encoding the id again refuses line ends and stray bits, which the
	// decoder ignores.
	if last.Version() != 7 || cursorAfter(last) != text {
		return uuid.Nil, problemCursor
	}
	return last, nil
}
