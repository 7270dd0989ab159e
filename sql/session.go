// Package sql holds the schema and the queries as files, and brings a database to that schema.
package sql

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// sessionTimeout bounds each step that makes a session ready for use.
const sessionTimeout = 3 * time.Second

// ErrPooler is wrapped by Check's error for a pooler that gives a client another session for each transaction or
// statement. Settings, locks and prepared statements do not last there.
var ErrPooler = errors.New("a pooler in transaction or statement mode is in front of Postgres: set its pool_mode to " +
	"session, or DATABASE_URL to Postgres itself")

// PrepareSessions has each new session of config set what the SQL of this program relies on, in one round trip.
// serviceLimit bounds its transactions; "" for no bound. With several hosts, sessions are to the one that takes writes.
//
// The settings are no parameters of the start, because a pooler refuses those that it does not know.
func PrepareSessions(config *pgconn.Config, serviceLimit string) {
	var limit []byte
	if serviceLimit != "" {
		limit = []byte(serviceLimit)
	}
	config.AfterConnect = func(ctx context.Context, conn *pgconn.PgConn) error {
		ctx, cancel := context.WithTimeout(ctx, sessionTimeout)
		defer cancel()
		return conn.ExecParams(ctx, pgPrepareSession, [][]byte{limit}, nil, nil, nil).Read().Err
	}
	for _, other := range config.Fallbacks {
		if config.ValidateConnect == nil && (other.Host != config.Host || other.Port != config.Port) {
			config.ValidateConnect = pgconn.ValidateConnectTargetSessionAttrsReadWrite
		}
	}
}

// CheckPooler returns ErrPooler if a second client gets the session of conn, or conn another one than before. It asks
// for a second one only if the process that conn was told of is not the one that answers.
func CheckPooler(ctx context.Context, conn *pgx.Conn) error {
	ctx, cancel := context.WithTimeout(ctx, sessionTimeout)
	defer cancel()
	first := conn.PgConn()
	process, err := readProcess(ctx, first)
	if err != nil || process == fmt.Sprint(first.PID()) {
		return err
	}
	second, err := pgconn.ConnectConfig(ctx, &conn.Config().Config)
	if err != nil {
		return nil //nolint:nilerr // perhaps the pooler has no session for it; in session mode this one is enough
	}
	defer func() { _ = second.Close(context.WithoutCancel(ctx)) }()
	for range poolerLooks {
		for _, client := range []*pgconn.PgConn{second, first} {
			is, err := readProcess(ctx, client)
			if err == nil && (is == process) != (client == first) {
				return ErrPooler
			}
		}
	}
	return nil
}

// poolerLooks: of a busy pooler, a client may get the same session several times in a row.
const poolerLooks = 20

// readProcess returns the process of the server that answers conn.
func readProcess(ctx context.Context, conn *pgconn.PgConn) (string, error) {
	answers, err := conn.Exec(ctx, "SELECT pg_backend_pid()").ReadAll()
	if err != nil {
		return "", err
	}
	return string(answers[0].Rows[0][0]), nil
}
