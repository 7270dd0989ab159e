package ingress

import (
	"encoding/base64"
	"net/url"
	"strconv"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/reservation"
)

// longestPage bounds the items of a page.
const pageMax = 100

// page is which part of a list is asked for.
type page struct {
	limit int
	// after is the last item of the page before; the zero id is where the first page begins.
	after uuid.UUID
}

// readPage reads the query of a list: limit and cursor, each once at most. Any other parameter is refused, because to
// ignore a cursor that is misspelled is to answer the first page again, without an end.
func readPage(c echo.Context, otherwise int) (page, error) {
	query, err := url.ParseQuery(c.Request().URL.RawQuery)
	if err != nil {
		return page{}, invalid("The query of the URL is not valid.")
	}
	p := page{limit: otherwise}
	for name, values := range query {
		if len(values) > 1 {
			return page{}, &reservation.InvalidError{Field: truncate(name), Reason: "must be given once"}
		}
		switch name {
		case "limit":
			p.limit, err = parseLimit(values[0], otherwise)
		case "cursor":
			p.after, err = parseCursor(values[0])
		default:
			err = &reservation.InvalidError{Field: truncate(name), Reason: "is not known here; a list takes limit and cursor"}
		}
		if err != nil {
			return page{}, err
		}
	}
	return p, nil
}

// parseLimit reads how many items a page may have.
func parseLimit(text string, otherwise int) (int, error) {
	if text == "" {
		return otherwise, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > pageMax {
		return 0, &reservation.InvalidError{Field: "limit", Reason: "must be a whole number from 1 to " + strconv.Itoa(pageMax)}
	}
	return n, nil
}

// cursorAfter is the cursor of the page that follows the item with this id. Clients are not to see an id in it.
func cursorAfter(last uuid.UUID) string { return base64.RawURLEncoding.EncodeToString(last[:]) }

// parseCursor reads what cursorAfter wrote; no cursor is the zero id.
func parseCursor(text string) (uuid.UUID, error) {
	if text == "" {
		return uuid.Nil, nil
	}
	var last uuid.UUID
	raw, err := base64.RawURLEncoding.DecodeString(text)
	if err == nil && len(raw) == len(last) {
		last = uuid.UUID(raw)
	}
	// Sales and orders have ids of version 7. The text is compared with what cursorAfter writes, because the decoder
	// passes over line ends and stray bits.
	if last.Version() != 7 || cursorAfter(last) != text {
		return uuid.Nil, &reservation.InvalidError{Field: "cursor", Reason: `must be the "next_cursor" of a page before`}
	}
	return last, nil
}
