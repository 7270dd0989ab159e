package crowd

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"github.com/google/uuid"
)

// CreateSale creates a sale at an ingress, as an operator.
func CreateSale(ctx context.Context, baseURL, adminToken string, terms SaleTerms) (uuid.UUID, error) {
	sale, err := createSale(ctx, baseURL, adminToken, terms)
	if err != nil {
		return uuid.Nil, fmt.Errorf("create a sale: %w", err)
	}
	return sale, nil
}

// SaleTerms are the terms of a sale that opens immediately. Zero stands for the default of the API.
type SaleTerms struct {
	Name          string `json:"name"`
	Stock         int64  `json:"stock"`
	PerOrderLimit int64  `json:"per_order_limit,omitempty"`
	Shards        int    `json:"shards,omitempty"`
}

func createSale(ctx context.Context, baseURL, adminToken string, terms SaleTerms) (uuid.UUID, error) {
	target, err := url.JoinPath(baseURL, "v1", "sales")
	if err != nil {
		return uuid.Nil, err
	}
	body, err := json.Marshal(terms)
	if err != nil {
		return uuid.Nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, target, bytes.NewReader(body))
	if err != nil {
		return uuid.Nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+adminToken)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return uuid.Nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusCreated {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, answerBytes)) // as much as can be read
		return uuid.Nil, fmt.Errorf("HTTP %d: %s", resp.StatusCode, problemText(text))
	}
	var sale struct {
		ID uuid.UUID `json:"id"`
	}
	err = json.NewDecoder(resp.Body).Decode(&sale)
	return sale.ID, err
}

// problemText returns the title and detail of an RFC 9457 problem, or any other body in quotes.
func problemText(body []byte) string {
	var problem struct{ Title, Detail string }
	switch err := json.Unmarshal(body, &problem); {
	case err != nil || problem.Title == "":
		return strconv.Quote(string(body))
	case problem.Detail == "":
		return problem.Title
	}
	return problem.Title + ": " + problem.Detail
}
