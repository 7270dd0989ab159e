package ingress

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"strconv"

	"github.com/labstack/echo/v4"

	"stampede/internal/operators"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

// historyMax bounds the changes of an answer, and is how many there are without a limit. Few sales have more than ten.
const historyMax = 1000

// showSaleHistory serves GET /v1/admin/sales/{sale}/history.
func (s *Server) showSaleHistory(c echo.Context) error {
	if _, err := s.admin.admit(c.Request(), operators.Viewer); err != nil {
		return err
	}
	limit, err := historyLimit(c.Request().URL.RawQuery)
	if err != nil {
		return err
	}
	id, ok := parseID(c.Param("sale"))
	if !ok {
		return problemSaleNotFound
	}
	answer := struct {
		Changes []catalog.ChangeView `json:"changes"`
	}{[]catalog.ChangeView{}}
	found := true
	err = s.queryPostgres(c.Request().Context(), operatorTimeout, func(ctx context.Context) error {
		changes, err := s.config.Sales.History(ctx, id, limit)
		if found = !errors.Is(err, reservation.ErrSaleNotFound); !found {
			return nil // Postgres has answered
		}
		for _, change := range changes {
			answer.Changes = append(answer.Changes, change.View())
		}
		return err
	})
	if err != nil {
		return err
	}
	if !found {
		return problemSaleNotFound
	}
	return writeJSON(c, http.StatusOK, answer)
}

// historyLimit reads the query, and refuses other parameters than limit.
func historyLimit(raw string) (int, error) {
	query, err := url.ParseQuery(raw)
	if err != nil {
		return 0, invalid("The query of the URL is not valid.")
	}
	limit := historyMax
	for name, values := range query {
		switch {
		case name != "limit":
			return 0, &order.InvalidError{Field: truncate(name), Reason: "is not known; this call takes limit"}
		case len(values) > 1:
			return 0, &order.InvalidError{Field: name, Reason: "must be given once"}
		case values[0] == "":
			continue
		}
		if limit, err = strconv.Atoi(values[0]); err != nil || limit < 1 || limit > historyMax {
			reason := "must be a whole number from 1 to " + strconv.Itoa(historyMax)
			return 0, &order.InvalidError{Field: name, Reason: reason}
		}
	}
	return limit, nil
}
