// Package connect opens Redis and Postgres with the limits that each kind of use needs. All of them
// connect when they are first used, and go on working after the server was away.
package connect

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/sql"
)

const (
	postgresDial = 3 * time.Second
	// idleInTransactionMS, in milliseconds, is when Postgres itself ends a transaction whose worker
	// fell silent: it may hold the row of a hot sale, which all other workers wait for.
	idleInTransactionMS = "30000"
)

// Postgres returns a pool of at most maxConns connections, or sql.ErrDatabaseURL.
func Postgres(ctx context.Context, databaseURL string, maxConns int32) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(databaseURL)
	if databaseURL == "" || err != nil {
		return nil, sql.ErrDatabaseURL
	}
	config.MaxConns = maxConns
	config.MinConns = 0
	config.ConnConfig.ConnectTimeout = postgresDial
	setDefault(config.ConnConfig.RuntimeParams, "application_name", "stampede")
	setDefault(config.ConnConfig.RuntimeParams, "idle_in_transaction_session_timeout", idleInTransactionMS)
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("open Postgres: %w", err)
	}
	return pool, nil
}

func setDefault(params map[string]string, name, value string) {
	if _, given := params[name]; !given {
		params[name] = value
	}
}
