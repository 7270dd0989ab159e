package localserver_test

import (
	"context"
	"fmt"
	"testing"

	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m, testkit.WithCommand(ownServers)) }

// ownServers starts both servers, prints their URLs and process ids, and waits to be killed.
func ownServers() int {
	pair, err := localserver.Provide(context.Background(), localserver.Wanted{})
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println("urls", pair.RedisURL, pair.DatabaseURL)
	fmt.Println("pids", pair.Redis.Pid(), pair.Postgres.Pid())
	select {}
}
