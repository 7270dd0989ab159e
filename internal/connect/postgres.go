// Package connect creates clients of Redis and Postgres with the limits of each kind of use. All of them
// connect on first use, and reconnect after an outage.
package connect

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/internal/tracing"
	"stampede/sql"
)

const (
	postgresDial = 3 * time.Second

	// A session whose client has vanished may hold the lock on the row of a hot sale, which blocks all others. With these
	// settings a server detects a vanished client within ten seconds: by keepalives while it waits for the client, and by
	// tcp_user_timeout while an answer is not acknowledged.
	keepaliveIdle     = 5 * time.Second
	keepaliveInterval = time.Second
	keepaliveCount    = 5
	// idleInTransactionMS, in milliseconds, is when Postgres ends a transaction whose client is idle between two
	// statements. It does not apply within a batch: fulfillment/blockers.go ends such a session.
	idleInTransactionMS = "10000"

	// serviceTransactionMS, in milliseconds, bounds a whole transaction of a service in PostgreSQL 17 and
	// later. A service cancels its own transactions earlier, after ten seconds at most.
	serviceTransactionMS = "12000"
	// transactionTimeoutSince is the first major version that has transaction_timeout. An older server refuses
	// connections with this setting.
	transactionTimeoutSince = 17
)

// sessionSettings apply to all sessions. They end abandoned sessions.
var sessionSettings = map[string]string{
	"application_name":                    "stampede",
	"idle_in_transaction_session_timeout": idleInTransactionMS,
	"tcp_keepalives_idle":                 seconds(keepaliveIdle),
	"tcp_keepalives_interval":             seconds(keepaliveInterval),
	"tcp_keepalives_count":                strconv.Itoa(keepaliveCount),
	"tcp_user_timeout": strconv.FormatInt((keepaliveIdle +
		keepaliveCount*keepaliveInterval).Milliseconds(), 10),
}

// PostgresOption changes the configuration of a pool.
type PostgresOption func(*pgxpool.Config)

// Service is for the pool of a service with short transactions only. Its sessions are named "stampede <name>", and
// PostgreSQL 17 and later end its long transactions.
func Service(name string) PostgresOption {
	return func(config *pgxpool.Config) {
		setDefault(config.ConnConfig.RuntimeParams, "application_name", "stampede "+name)
		if _, given := config.ConnConfig.RuntimeParams["transaction_timeout"]; !given {
			config.AfterConnect = limitTransactions
		}
	}
}

// Traced makes spans of the statements of traced requests and orders.
func Traced(tracer *tracing.Tracer) PostgresOption {
	return func(config *pgxpool.Config) {
		if tracer != nil {
			config.ConnConfig.Tracer = tracer.Postgres(sql.NameOf)
		}
	}
}

// limitTransactions sets transaction_timeout if the server has it.
func limitTransactions(ctx context.Context, conn *pgx.Conn) error {
	version, _, _ := strings.Cut(conn.PgConn().ParameterStatus("server_version"), ".")
	if major, err := strconv.Atoi(version); err != nil || major < transactionTimeoutSince {
		return nil //nolint:nilerr // without a version the setting is left out
	}
	_, err := conn.Exec(ctx, "SET transaction_timeout = "+serviceTransactionMS)
	return err
}

// Postgres returns a pool of at most maxConns connections, or sql.ErrDatabaseURL. Settings in the URL
// override those of this package.
func Postgres(
	ctx context.Context, databaseURL string, maxConns int32, options ...PostgresOption,
) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(databaseURL)
	if databaseURL == "" || err != nil {
		return nil, sql.ErrDatabaseURL
	}
	config.MaxConns = maxConns
	config.MinConns = 0
	config.ConnConfig.ConnectTimeout = postgresDial
	config.ConnConfig.DialFunc = dial
	for _, option := range options {
		option(config)
	}
	for name, value := range sessionSettings {
		setDefault(config.ConnConfig.RuntimeParams, name, value)
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("open Postgres: %w", err)
	}
	return pool, nil
}

// dial uses the same keepalives as the server, so that the client detects a vanished server.
func dial(ctx context.Context, network, addr string) (net.Conn, error) {
	dialer := net.Dialer{Timeout: postgresDial, KeepAliveConfig: net.KeepAliveConfig{
		Enable: true, Idle: keepaliveIdle, Interval: keepaliveInterval, Count: keepaliveCount,
	}}
	return dialer.DialContext(ctx, network, addr)
}

func seconds(d time.Duration) string { return strconv.Itoa(int(d / time.Second)) }

func setDefault(params map[string]string, name, value string) {
	if _, given := params[name]; !given {
		params[name] = value
	}
}
