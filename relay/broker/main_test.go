package broker_test

import (
	"testing"

	"go.uber.org/goleak"

	"stampede/internal/test/testkit"
)

// The metrics of Kafka's client have one goroutine, which never ends.
const kafkaMeter = "github.com/rcrowley/go-metrics.(*meterArbiter).tick"

func TestMain(m *testing.M) {
	testkit.Main(m, testkit.IgnoreLeaks(goleak.IgnoreAnyFunction(kafkaMeter)))
}
