package ingress

import (
	"encoding/base64"
	"net/url"
	"strconv"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/reservation/order"
)

// pageMax bounds the items of a page.
const pageMax = 100

// pageRequest is the part of a list that a request asks for.
type pageRequest struct {
	limit int
	// after is the last item of the previous page; zero asks for the first page.
	after uuid.UUID
}

// readPage reads the query of a list: limit and cursor, each at most once. It refuses other parameters: if a
// misspelled cursor were ignored, the client would read the first page forever.
func readPage(c echo.Context, defaultLimit int) (pageRequest, error) {
	query, err := url.ParseQuery(c.Request().URL.RawQuery)
	if err != nil {
		return pageRequest{}, invalid("The query of the URL is not valid.")
	}
	p := pageRequest{limit: defaultLimit}
	for name, values := range query {
		if len(values) > 1 {
			return pageRequest{}, &order.InvalidError{Field: truncate(name), Reason: "must be given once"}
		}
		switch name {
		case "limit":
			p.limit, err = parseLimit(values[0], defaultLimit)
		case "cursor":
			p.after, err = parseCursor(values[0])
		default:
			err = &order.InvalidError{Field: truncate(name), Reason: "is not known; a list takes limit and cursor"}
		}
		if err != nil {
			return pageRequest{}, err
		}
	}
	return p, nil
}

func parseLimit(text string, defaultLimit int) (int, error) {
	if text == "" {
		return defaultLimit, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > pageMax {
		reason := "must be a whole number from 1 to " + strconv.Itoa(pageMax)
		return 0, &order.InvalidError{Field: "limit", Reason: reason}
	}
	return n, nil
}

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
		return uuid.Nil, &order.InvalidError{Field: "cursor", Reason: `must be the "next_cursor" of another page`}
	}
	return last, nil
}
