package ingress

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/internal/accept"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

// catalogTimeout bounds an operator's call. It is shorter than the server's accept.WriteTimeout.
const catalogTimeout = 5 * time.Second

// operatorService serves the calls of operators.
type operatorService struct {
	*core
	sales *saleService
}

// saleBodyMax bounds the body of a new sale, or of new names: 52 items with long names need a KiB each.
const saleBodyMax = accept.MaxBodyBytes + order.MaxItems<<10

// createSale serves POST /v1/sales.
func (s *operatorService) createSale(c echo.Context, operator string) error {
	key, err := idempotencyKey(c.Request().Header)
	if err != nil {
		return err
	}
	// Those that differ from 0 where they are left out, or null, stand beside the terms.
	body := struct {
		reservation.TermsView
		Items         []reservation.Item `json:"items"`
		PerOrderLimit *int64             `json:"per_order_limit"`
		UnitPrice     *int64             `json:"unit_price"`
		Shards        *int               `json:"shards"`
	}{}
	if err := readObject(c, &body); err != nil {
		return err
	}
	terms := body.Terms(body.Items)
	if body.Items != nil && len(body.Items) == 0 {
		return &order.InvalidError{Field: "items", Reason: "must be at least 1, or left out"}
	}
	for _, i := range body.Items {
		terms.Stock += i.Stock // not their sum if there is a stock: Validate refuses it
	}
	terms.PerOrderLimit = 1
	if body.PerOrderLimit != nil {
		terms.PerOrderLimit = *body.PerOrderLimit
	}
	if body.UnitPrice != nil {
		if terms.UnitPrice = *body.UnitPrice; terms.UnitPrice == 0 {
			return &order.InvalidError{Field: "unit_price", Reason: "must be at least 1"}
		}
	}
	if body.Shards != nil {
		if terms.Shards = *body.Shards; terms.Shards == 0 {
			return &order.InvalidError{Field: "shards", Reason: "must be at least 1"}
		}
	}
	ctx, cancel := context.WithTimeout(catalog.WithOperator(c.Request().Context(), operator), catalogTimeout)
	defer cancel()
	sale, replayed, err := s.config.Sales.CreateOnce(ctx, terms, key)
	s.sales.invalidate()
	if err != nil {
		return err
	}
	if replayed {
		c.Response().Header()["Idempotency-Replayed"] = headerTrue
	}
	s.metrics.sales.add(sale.ID)
	s.prices.learn([]catalog.CountResult{{CountedSale: sale}})
	c.Response().Header()["Location"] = []string{"/v1/sales/" + sale.ID.String()}
	return writeJSON(c, http.StatusCreated, sale)
}

// change serves POST /v1/sales/{sale}/pause, resume and end.
func (s *operatorService) change(change func(context.Context, uuid.UUID) (catalog.CountedSale, error)) call {
	return func(c echo.Context, operator string) error { return s.answerSaleChange(c, operator, change) }
}

// restockSale serves POST /v1/sales/{sale}/restock.
func (s *operatorService) restockSale(c echo.Context, operator string) error {
	key, err := idempotencyKey(c.Request().Header)
	if err != nil {
		return err
	}
	var body struct {
		Units int64            `json:"units"`
		Items map[string]int64 `json:"items"`
	}
	if err := readObject(c, &body); err != nil {
		return err
	}
	switch {
	case body.Units == 0 && body.Items == nil:
		return &order.InvalidError{
			Field: "units", Reason: "must be a whole number, below zero to remove units, unless there are items",
		}
	case body.Units != 0 && body.Items != nil:
		return &order.InvalidError{Field: "units", Reason: "must be left out if there are items"}
	}
	return s.answerSaleChange(c, operator, func(ctx context.Context, sale uuid.UUID) (catalog.CountedSale, error) {
		if body.Items != nil {
			return s.config.Sales.RestockItems(ctx, sale, body.Items, key)
		}
		return s.config.Sales.Restock(ctx, sale, body.Units, key)
	})
}

// renameSale serves POST /v1/sales/{sale}/rename.
func (s *operatorService) renameSale(c echo.Context, operator string) error {
	var to catalog.Names
	if err := readObject(c, &to); err != nil {
		return err
	}
	return s.answerSaleChange(c, operator, func(ctx context.Context, sale uuid.UUID) (catalog.CountedSale, error) {
		return s.config.Sales.Rename(ctx, sale, to)
	})
}

// answerSaleChange changes the sale in the path for an operator, and answers with it.
func (s *operatorService) answerSaleChange(
	c echo.Context, operator string, change func(context.Context, uuid.UUID) (catalog.CountedSale, error),
) error {
	id, ok := parseID(c.Param("sale"))
	if !ok {
		return problemSaleNotFound
	}
	ctx, cancel := context.WithTimeout(catalog.WithOperator(c.Request().Context(), operator), catalogTimeout)
	defer cancel()
	sale, err := change(ctx, id)
	s.sales.invalidate()
	if err != nil {
		return err
	}
	return writeJSON(c, http.StatusOK, sale)
}

// historyMax bounds the changes of an answer, and is how many there are without a limit. Few sales have more than ten.
const historyMax = 1000

// showSaleHistory serves GET /v1/admin/sales/{sale}/history.
func (s *operatorService) showSaleHistory(c echo.Context, _ string) error {
	limit := historyMax
	err := readQuery(c, map[string]func(string) error{"limit": limitParameter(&limit, historyMax)})
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
	err = s.orders.query(c.Request().Context(), operatorTimeout, func(ctx context.Context) error {
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
