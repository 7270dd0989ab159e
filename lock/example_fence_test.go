package lock_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/jackc/pgx/v5"

	"stampede/internal/dev/localserver"
	"stampede/lock"
)

// deposit refuses a stale token: the row keeps the largest token that it has seen.
const deposit = `
	UPDATE pg_temp.accounts SET balance = balance + $2, fence = $3
	WHERE id = $1 AND fence <= $3`

// The store refuses a holder that was stopped for longer than its lease and did not check it before
// the write.
func ExampleLease_Token() {
	ctx := context.Background()
	rdb, stopRedis := exampleRedis(ctx)
	defer stopRedis()
	bank, stopPostgres := examplePostgres(ctx)
	defer stopPostgres()
	locker := lock.New(rdb)
	defer closeExample(ctx, locker)
	_, err := bank.Exec(ctx, `
		CREATE TEMP TABLE accounts (id bigint PRIMARY KEY, balance bigint NOT NULL, fence bigint NOT NULL DEFAULT 0);
		INSERT INTO accounts (id, balance) VALUES (1, 100)`)
	if err != nil {
		log.Fatal(err)
	}
	write := func(who string, lease *lock.Lease) {
		done, err := bank.Exec(ctx, deposit, 1, 10, lease.Token("{example}:account:1"))
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(who, "wrote", done.RowsAffected(), "row")
	}

	stopped, err := locker.Acquire(ctx, "{example}:account:1", lock.For(time.Second))
	if err != nil {
		log.Fatal(err)
	}
	successor, err := locker.Acquire(ctx, "{example}:account:1") // waits until that lease has ended
	if err != nil {
		log.Fatal(err)
	}
	write("the successor", successor)
	write("the stopped holder", stopped)
	fmt.Println(stopped.Release(ctx))
	fmt.Println(successor.Release(ctx))
	// Output:
	// the successor wrote 1 row
	// the stopped holder wrote 0 row
	// lock lost: {example}:account:1
	// <nil>
}

// examplePostgres connects to the Postgres of the tests, or starts one.
func examplePostgres(ctx context.Context) (*pgx.Conn, func()) {
	url, stop := os.Getenv("DATABASE_URL"), func() {}
	if url == "" {
		server, err := localserver.StartPostgres(ctx, localserver.PostgresOptions{})
		if err != nil {
			log.Fatal(err)
		}
		url, stop = server.URL, server.Stop
	}
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		log.Fatal(err)
	}
	return conn, func() { _ = conn.Close(ctx); stop() }
}
