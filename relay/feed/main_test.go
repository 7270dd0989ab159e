package feed_test

import (
	"testing"

	"stampede/internal/test/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }
