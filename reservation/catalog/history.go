package catalog

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/reservation"
	"stampede/sql"
)

// operatorKey is the key of WithOperator.
type operatorKey struct{}

// WithOperator has changes of sales that are made with the context recorded as those of the operator.
func WithOperator(ctx context.Context, name string) context.Context {
	return context.WithValue(ctx, operatorKey{}, name)
}

// operatorOf returns the operator of a change; "" if Stampede makes it by itself.
func operatorOf(ctx context.Context) string {
	name, _ := ctx.Value(operatorKey{}).(string)
	return name
}

// Change is a revision of a sale.
type Change struct {
	Revision int64
	// Type is the name of the event: SaleCreated, SalePaused and so on.
	Type       string
	OccurredAt time.Time
	// Operator made the change. It is empty if Stampede made it by itself, or before operators were recorded.
	Operator string
	// Data is a JSON object.
	Data []byte
}

// Name returns the type without its prefix, in lower case: created, paused and so on.
func (c Change) Name() string { return strings.ToLower(strings.TrimPrefix(c.Type, "Sale")) }

// ChangeView is a change as the HTTP API and the commands show it.
type ChangeView struct {
	Revision   int64           `json:"revision"`
	Change     string          `json:"change"`
	OccurredAt string          `json:"occurred_at"`
	Operator   string          `json:"operator,omitempty"`
	Data       json.RawMessage `json:"data"`
}

// View returns the change as it is shown.
func (c Change) View() ChangeView {
	return ChangeView{c.Revision, c.Name(), timestamp(c.OccurredAt), c.Operator, c.Data}
}

// History returns the newest changes of a sale, at most limit, oldest first. It returns ErrSaleNotFound for an
// unknown sale.
func (c *Catalog) History(ctx context.Context, sale uuid.UUID, limit int) ([]Change, error) {
	rows, _ := c.pool.Query(ctx, sql.CatalogSaleHistory, sale, limit) // its error comes with the rows
	changes, err := pgx.CollectRows(rows, pgx.RowToStructByName[Change])
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: history of sale=%s: %w", reservation.ErrUnavailable, sale, err)
	case len(changes) == 0: // a sale is created with its first change
		return nil, reservation.ErrSaleNotFound
	}
	return changes, nil
}
