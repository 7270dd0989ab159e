package ingress

import (
	"strings"
	"time"
)

// longestWait bounds for how long a purchase waits for its end, whatever the client prefers.
const waitMax = 30 * time.Second

// preferredWait is how long the client wants to wait for the end of what it asks for (RFC 7240, section 4.3): the first
// wait among its preferences. It is false if there is none, or one that is not a number of seconds.
func preferredWait(headers []string) (time.Duration, bool) {
	for _, header := range headers {
		for header != "" {
			var preference string
			preference, header = cutUnquoted(header, ',')
			preference, _ = cutUnquoted(preference, ';') // what follows are parameters, which wait has none of
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

// cutUnquoted cuts at the first separator that is not within quotes, in which a backslash escapes.
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
