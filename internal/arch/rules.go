package arch

import (
	"slices"
	"strings"
)

// fileLinesMax is where a file has more than one job, and a reader has to scroll for either.
const fileLinesMax = 550

// may says which packages of ours a package may import. It is the order in which they stand: what
// is further up can be understood, tested and used without what is further down.
var may = map[string][]string{
	"lua":                 {},
	"sql":                 {},
	"lock":                {"lua"},
	"reservation/order":   {},
	"reservation":         {"lua", "sql", "reservation/order", "internal/pause"},
	"reservation/catalog": {"lua", "sql", "reservation", "reservation/order", "internal/pause"},
	// ingress and fulfillment meet in Redis and Postgres only, so that either runs without the other.
	"ingress": {"reservation", "reservation/catalog", "reservation/order", "internal/accept", "internal/ratelimit"},
	"fulfillment": {
		"sql",
		"lock",
		"reservation",
		"fulfillment/batch",
		"fulfillment/deadletter",
		"fulfillment/ledger",
		"fulfillment/metrics",
		"fulfillment/rebuild",
		"fulfillment/stream",
		"internal/pause",
		"internal/pg",
		"internal/retry",
		"reservation/catalog",
		"reservation/order",
	},
	"fulfillment/stream": {"lua", "internal/pause", "internal/retry", "internal/telemetry", "reservation/order"},
	"fulfillment/ledger": {
		"sql",
		"reservation",
		"fulfillment/stream",
		"internal/crashpoint",
		"internal/pause",
		"internal/retry",
		"internal/telemetry",
		"reservation/catalog",
		"reservation/order",
	},
	"fulfillment/metrics": {
		"lock",
		"fulfillment/ledger",
		"fulfillment/stream",
		"internal/retry",
		"internal/telemetry",
		"reservation/order",
	},
	"fulfillment/rebuild": {
		"sql",
		"reservation",
		"fulfillment/ledger",
		"fulfillment/stream",
		"internal/crashpoint",
		"internal/pg",
		"internal/retry",
		"internal/telemetry",
		"reservation/order",
	},
	"fulfillment/batch": {
		"lock",
		"reservation",
		"fulfillment/ledger",
		"fulfillment/metrics",
		"fulfillment/rebuild",
		"fulfillment/stream",
		"internal/crashpoint",
		"internal/pause",
		"internal/retry",
		"reservation/order",
	},
	"fulfillment/deadletter": {
		"sql", "reservation", "fulfillment/ledger", "fulfillment/stream", "internal/pg",
		"reservation/order",
	},
	"fulfillment/projection": {
		"sql",
		"fulfillment/ledger",
		"internal/crashpoint",
		"internal/pause",
		"internal/pg",
		"internal/retry",
		"reservation/order",
	},
	"fulfillment/audit": {
		"lua",
		"sql",
		"reservation",
		"fulfillment/deadletter",
		"fulfillment/projection",
		"fulfillment/rebuild",
		"fulfillment/stream",
		"internal/figure",
		"internal/pause",
		"internal/pg",
		"internal/retry",
		"reservation/catalog",
		"reservation/order",
	},
}

// wirers put the roles together in one process, and may import whatever they run.
var wirers = []string{"internal/demo"}

// roles are what only a wirer and a command may import.
var roles = []string{"ingress", "fulfillment"}

// forTests are never part of a program.
var forTests = []string{
	"internal/testkit", "internal/testsale", "internal/testshop", "internal/testwork",
	"internal/arch", "internal/docs",
}

// banned are functions that no file may call, and what to do instead.
var banned = []struct{ pkg, function, instead string }{
	{"context", "TODO", "pass the caller's context"},
	{"time", "Sleep", "wait for a state, or for a timer and the context"},
}

// mayCall excepts the one loop that waits for a state on behalf of all tests.
var mayCall = map[string]string{"internal/testkit/eventually.go": "time.Sleep"}

// refuse tells why the package in one folder may not import that in another; it is empty if it may.
func refuse(from, to string) string {
	isCommand := within(from, "cmd")
	switch {
	case slices.Contains(forTests, from):
		return ""
	case slices.Contains(forTests, to):
		return "is for tests only"
	case within(to, "cmd") && !isCommand:
		return "is nobody's library"
	case isCommand || slices.Contains(wirers, from):
		return ""
	case within(from, "internal"):
		if slices.ContainsFunc(roles, func(role string) bool { return within(to, role) }) {
			return "is for cmd and " + strings.Join(wirers, ", ")
		}
		return ""
	}
	allowed, known := may[from]
	switch {
	case !known:
		return "needs a rule in internal/arch: this package has none"
	case !slices.Contains(allowed, to):
		return "points the wrong way"
	}
	return ""
}

func within(folder, parent string) bool {
	return folder == parent || strings.HasPrefix(folder, parent+"/")
}
