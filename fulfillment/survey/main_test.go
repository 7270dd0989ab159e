package survey_test

import (
	"testing"

	"stampede/internal/testwork"
)

func TestMain(m *testing.M) { testwork.Main(m) }
