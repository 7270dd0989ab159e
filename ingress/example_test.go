package ingress_test

import (
	"context"
	"fmt"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"sync"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/labstack/echo/v4"
	"github.com/redis/go-redis/v9"

	"stampede/ingress"
	"stampede/internal/dev/localserver"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/sql"
	"stampede/sql/migrate"
)

// A server of one's own sells beside its other routes. Workers (stampede work) run as always.
func ExampleServer_Handler() {
	ctx := context.Background()
	servers, err := localserver.Provide(ctx, localserver.Wanted{}) // yours: REDIS_URL and DATABASE_URL
	if err != nil {
		log.Fatal(err)
	}
	defer servers.Stop()
	if err := migrate.Up(ctx, servers.DatabaseURL); err != nil { // stampede migrate up
		log.Fatal(err)
	}
	postgres, err := pgxpool.ParseConfig(servers.DatabaseURL)
	if err != nil {
		log.Fatal(err)
	}
	sql.PrepareSessions(&postgres.ConnConfig.Config, "")
	pool, err := pgxpool.NewWithConfig(ctx, postgres)
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	options, err := redis.ParseURL(servers.RedisURL)
	if err != nil {
		log.Fatal(err)
	}
	keys := reservation.Keys{Prefix: reservation.DefaultPrefix, Partitions: 1} // STAMPEDE_PARTITIONS
	store := reservation.NewStore(redis.NewClient(options), keys, reservation.StoreOptions{})
	defer store.Close()
	sales, orders := catalog.New(pool, store), ledger.New(pool)

	server, err := ingress.New(ingress.Config{
		Reservations: store, Sales: sales, Orders: orders, Postgres: orders,
		Auth: ingress.AuthHeader, // your server has authenticated the buyer, and sets X-User-ID
	})
	if err != nil {
		log.Fatal(err)
	}
	// Beside it, as in stampede serve: the guard keeps it from selling from a replaced Redis, and heartbeats tell the
	// time in which buyers could not pay.
	besideCtx, stop := context.WithCancel(ctx)
	var beside sync.WaitGroup
	beside.Go(func() { _ = reservation.Guard{Store: store, Pool: pool, Logger: slog.Default()}.Run(besideCtx) })
	beside.Go(func() { _ = ledger.Heartbeat{Pool: pool, Logger: slog.Default()}.Run(besideCtx) })
	defer beside.Wait()
	defer stop()
	defer server.Close() // before your server's Shutdown: it ends waiting purchases and event streams

	e := echo.New()
	e.GET("/", func(c echo.Context) error { return c.String(http.StatusOK, "the shop") })
	e.Any("/v1/*", echo.WrapHandler(server.Handler()))
	e.Any("/problems/*", echo.WrapHandler(server.Handler()))

	sale, err := sales.Create(ctx, reservation.Terms{Name: "Sneaker drop", Stock: 100, PerOrderLimit: 1})
	if err != nil {
		log.Fatal(err)
	}
	for _, call := range []string{"GET /", "POST /v1/sales/" + sale.ID.String() + "/orders", "GET /problems/sold-out"} {
		var method, path string
		_, _ = fmt.Sscan(call, &method, &path)
		request := httptest.NewRequestWithContext(ctx, method, path, http.NoBody)
		request.Header.Set("X-User-ID", "ann")
		answer := httptest.NewRecorder()
		e.ServeHTTP(answer, request)
		fmt.Println(method, answer.Code)
	}
	// Output:
	// GET 200
	// POST 202
	// GET 200
}
