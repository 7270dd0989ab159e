package ingress

import (
	"encoding/base64"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"

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

// readPage reads the query of a list: limit, cursor and the given filters, each at most once. It refuses other
// parameters: if a misspelled cursor were ignored, the client would read the first page forever.
func readPage(
	c echo.Context, defaultLimit int, filters map[string]func(text string) error,
) (pageRequest, error) {
	query, err := url.ParseQuery(c.Request().URL.RawQuery)
	if err != nil {
		return pageRequest{}, invalid("The query of the URL is not valid.")
	}
	p := pageRequest{limit: defaultLimit}
	for name, values := range query {
		if len(values) > 1 {
			return pageRequest{}, &order.InvalidError{Field: truncate(name), Reason: "must be given once"}
		}
		filter := filters[name]
		switch {
		case name == "limit":
			p.limit, err = parseLimit(values[0], defaultLimit)
		case name == "cursor":
			p.after, err = parseCursor(values[0])
		case filter != nil:
			err = filter(values[0])
		default:
			known := append(slices.Sorted(maps.Keys(filters)), "limit")
			err = &order.InvalidError{
				Field: truncate(name), Reason: "is not known; this list takes " + strings.Join(known, ", ") + " and cursor",
			}
		}
		if err != nil {
			return pageRequest{}, err
		}
	}
	return p, nil
}

// parseSaleFilter reads the id of a sale. An empty one is refused, like any other that is none: it may come from an
// empty variable of a client, which would get orders of all sales.
func parseSaleFilter(name, text string, sale *uuid.UUID) error {
	id, ok := parseID(text)
	if !ok || id == uuid.Nil {
		return &order.InvalidError{Field: name, Reason: "must be the id of a sale"}
	}
	*sale = id
	return nil
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
