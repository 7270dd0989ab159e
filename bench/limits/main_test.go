package limits

import (
	"testing"

	"stampede/bench/rig"
)

func TestMain(m *testing.M) { rig.Main(m, "limits", "labstack/echo", "redis/go-redis", "jackc/pgx") }
