package ingress

import (
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

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

// idempotencyKey returns the request's key, or "" if it has none.
func idempotencyKey(h http.Header) (string, error) {
	switch keys := h["Idempotency-Key"]; len(keys) {
	case 0:
		return "", nil
	case 1:
		return keys[0], order.ValidateIdempotencyKey(keys[0])
	default:
		return "", invalid("Idempotency-Key must be sent once.")
	}
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

// hasETag reports whether If-None-Match names the tag (RFC 9110, section 13.1.2).
func hasETag(headers []string, etag string) bool {
	for _, header := range headers {
		for header != "" {
			var tag string
			tag, header = cutUnquoted(header, ',')
			if tag = trimOWS(tag); tag == "*" || strings.TrimPrefix(tag, "W/") == etag {
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
