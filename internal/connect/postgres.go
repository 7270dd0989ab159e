// Package connect opens Redis and Postgres with the limits that each kind of use needs. All of them
// connect when they are first used, and go on working after the server was away.
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

	"stampede/sql"
)

const (
	postgresDial = 3 * time.Second

	// A session whose client is gone may hold the row of a hot sale, for which all others wait. So a server notices within
	// ten seconds that a peer is gone without a word: keepalives see it while the server waits for the client, and
	// tcp_user_timeout where an answer is not acknowledged.
	keepaliveIdle     = 5 * time.Second
	keepaliveInterval = time.Second
	keepaliveCount    = 5
	// idleInTransactionMS, in milliseconds, is when Postgres itself ends a transaction whose client is silent between two
	// statements. It does not apply in the middle of a batch: fulfillment/blockers.go ends such a session.
	idleInTransactionMS = "10000"

	// serviceTransactionMS bounds a whole transaction of a service, in milliseconds, from PostgreSQL
	// 17 on. A service gives up itself before, after ten seconds at most.
	serviceTransactionMS = "12000"
	// transactionTimeoutSince is the first major version that has transaction_timeout. An older server refuses a
	// connection that asks for it.
	transactionTimeoutSince = 17
)

// sessionSettings are the settings of all our sessions. They end a session of which nobody takes care any more.
var sessionSettings = map[string]string{
	"application_name":                    "stampede",
	"idle_in_transaction_session_timeout": idleInTransactionMS,
	"tcp_keepalives_idle":                 seconds(keepaliveIdle),
	"tcp_keepalives_interval":             seconds(keepaliveInterval),
	"tcp_keepalives_count":                strconv.Itoa(keepaliveCount),
	"tcp_user_timeout": strconv.FormatInt((keepaliveIdle +
		keepaliveCount*keepaliveInterval).Milliseconds(), 10),
}

// PostgresOption changes how a pool is made.
type PostgresOption func(*pgxpool.Config)

// Service is for the pool of a server that makes short transactions only. Its sessions are named "stampede <name>", and
// PostgreSQL 17 and later end a transaction of it that does not end by itself.
func Service(name string) PostgresOption {
	return func(config *pgxpool.Config) {
		setDefault(config.ConnConfig.RuntimeParams, "application_name", "stampede "+name)
		if _, given := config.ConnConfig.RuntimeParams["transaction_timeout"]; !given {
			config.AfterConnect = limitTransactions
		}
	}
}

// limitTransactions sets transaction_timeout where the server has it.
func limitTransactions(ctx context.Context, conn *pgx.Conn) error {
	version, _, _ := strings.Cut(conn.PgConn().ParameterStatus("server_version"), ".")
	if major, err := strconv.Atoi(version); err != nil || major < transactionTimeoutSince {
		return nil //nolint:nilerr // a server that does not say its version is not asked for the setting
	}
	_, err := conn.Exec(ctx, "SET transaction_timeout = "+serviceTransactionMS)
	return err
}

// Postgres returns a pool of at most maxConns connections, or sql.ErrDatabaseURL. Settings of the URL win.
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

// dial connects with the keepalives that the server uses as well, so that this side notices a server that is gone.
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
