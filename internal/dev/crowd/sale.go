package crowd

import (
	"context"
	"fmt"

	"github.com/google/uuid"

	"stampede/internal/dev/apiclient"
	"stampede/reservation"
)

// CreateSale creates a sale at an ingress, as an operator. Without a limit per order it is one unit.
func CreateSale(ctx context.Context, url, adminToken string, terms reservation.Terms) (uuid.UUID, error) {
	client, err := apiclient.New(url, adminToken, "stampede crowd")
	if err != nil {
		return uuid.Nil, fmt.Errorf("create a sale: %w", err)
	}
	defer client.Close()
	terms.PerOrderLimit = max(terms.PerOrderLimit, 1)
	sale, _, err := client.CreateOnce(ctx, terms, uuid.NewString())
	return sale.ID, err
}
