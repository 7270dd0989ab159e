// Package connect creates clients of Redis and Postgres with the limits of each kind of use. All of them
// connect on first use, and reconnect after an outage.
package connect

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/internal/tracing"
	"stampede/sql"
)

const (
	postgresDial = 3 * time.Second

	// The client notices a vanished server as soon as pg/prepare_session.sql has the server notice a vanished client.
	keepaliveIdle     = 5 * time.Second
	keepaliveInterval = time.Second
	keepaliveCount    = 5

	// serviceTransactionMS, in milliseconds, bounds a whole transaction of a service in PostgreSQL 17 and
	// later. A service cancels its own transactions earlier, after ten seconds at most.
	serviceTransactionMS = "12000"
	// readOnlySessionMax is how long a session with a server that takes no writes is used. The next one may be with
	// another server: behind the same name, or of several hosts.
	readOnlySessionMax = time.Second
)

// PostgresOption changes the configuration of a pool.
type PostgresOption func(*pgxpool.Config)

// Service is for the pool of a service with short transactions only. Its sessions are named "stampede <name>", and
// PostgreSQL 17 and later end its long transactions.
func Service(name string) PostgresOption {
	return func(config *pgxpool.Config) {
		setDefault(config.ConnConfig.RuntimeParams, "application_name", "stampede "+name)
		sql.PrepareSessions(&config.ConnConfig.Config, serviceTransactionMS)
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
	config.AfterConnect, config.PrepareConn = noteBegin, keep
	sql.PrepareSessions(&config.ConnConfig.Config, "")
	for _, option := range options {
		option(config)
	}
	setDefault(config.ConnConfig.RuntimeParams, "application_name", "stampede")
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("open Postgres: %w", err)
	}
	return pool, nil
}

const beganAt = "stampede.began_at"

func noteBegin(_ context.Context, conn *pgx.Conn) error {
	conn.PgConn().CustomData()[beganAt] = time.Now()
	return nil
}

// keep reports whether the pool goes on with a session. It gives up a session whose server, at its last answer, took no
// writes. So a pool that only reads also finds the server that took over.
func keep(_ context.Context, conn *pgx.Conn) (bool, error) {
	began, _ := conn.PgConn().CustomData()[beganAt].(time.Time)
	session := conn.PgConn()
	readOnly := session.ParameterStatus("default_transaction_read_only") == "on" ||
		session.ParameterStatus("in_hot_standby") == "on"
	return !readOnly || time.Since(began) < readOnlySessionMax, nil
}

// dial uses the same keepalives as the server, so that the client detects a vanished server.
func dial(ctx context.Context, network, addr string) (net.Conn, error) {
	dialer := net.Dialer{Timeout: postgresDial, KeepAliveConfig: net.KeepAliveConfig{
		Enable: true, Idle: keepaliveIdle, Interval: keepaliveInterval, Count: keepaliveCount,
	}}
	return dialer.DialContext(ctx, network, addr)
}

func setDefault(params map[string]string, name, value string) {
	if _, given := params[name]; !given {
		params[name] = value
	}
}
