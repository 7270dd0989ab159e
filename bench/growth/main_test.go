package growth

import (
	"testing"

	"stampede/bench/rig"
)

func TestMain(m *testing.M) { rig.Main(m, "growth") }
