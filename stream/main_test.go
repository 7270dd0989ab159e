package stream_test

import (
	"testing"

	"go.uber.org/goleak"

	"stampede/internal/test/testkit"
)

// suiteReader is the goroutine of Watermill's conformance suite that reads from many subscriptions. It never ends if a
// message is redelivered after the suite has received enough, as happens on a busy machine.
const suiteReader = "github.com/ThreeDotsLabs/watermill/internal/subscriber.(*multiplier).Subscribe"

func TestMain(m *testing.M) {
	testkit.Main(m, testkit.IgnoreLeaks(
		goleak.IgnoreAnyFunction(suiteReader+".func2"), goleak.IgnoreAnyFunction(suiteReader+".func3"),
	))
}
