package offers_test

import (
	"testing"

	"stampede/internal/test/testwork"
)

func TestMain(m *testing.M) { testwork.Main(m) }
