package dashboard

import (
	"testing"

	"stampede/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }
