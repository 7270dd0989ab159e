package fulfillment

import (
	"testing"

	"go.uber.org/goleak"

	"stampede/internal/testkit"
)

// Watermill's conformance suite reads from many subscriptions at once, and leaves a reader behind if a message
// is delivered again after it has seen enough, as happens on a busy machine.
const suiteReader = "github.com/ThreeDotsLabs/watermill/internal/subscriber.(*multiplier).Subscribe"

func TestMain(m *testing.M) {
	testkit.Main(m, testkit.IgnoreLeaks(
		goleak.IgnoreAnyFunction(suiteReader+".func2"), goleak.IgnoreAnyFunction(suiteReader+".func3"),
	))
}
