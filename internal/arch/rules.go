package arch

import (
	"slices"
	"strings"
)

// fileLinesMax bounds a file: a longer one usually has more than one purpose.
const fileLinesMax = 550

// may lists the packages of this module that a package may import. The order is that of the layers: each
// package can be understood, tested and used without those below it in this list.
var may = map[string][]string{
	"lua":               {},
	"sql":               {},
	"lock":              {"lua"},
	"reservation/order": {},
	"reservation": {
		"lua", "sql", "reservation/order", "internal/crashpoint", "internal/retry", "internal/telemetry", "internal/tracing",
	},
	"reservation/catalog": {"lua", "sql", "reservation", "reservation/order", "internal/crashpoint", "internal/pg"},
	// ingress and fulfillment communicate only through Redis and Postgres, so that each runs without the other.
	"ingress": {
		"reservation", "reservation/catalog", "reservation/order", "ingress/apidoc", "internal/accept",
		"internal/forwarded", "internal/operators", "internal/pg", "internal/ratelimit", "internal/retry",
		"internal/telemetry", "internal/tracing",
	},
	"ingress/apidoc":     {},
	"internal/progress":  {"internal/figure"},
	"internal/apiclient": {"internal/retry", "reservation", "reservation/catalog", "reservation/order"},
	"fulfillment": {
		"sql",
		"lock",
		"reservation",
		"fulfillment/batch",
		"fulfillment/deadletter",
		"fulfillment/ledger",
		"fulfillment/metrics",
		"fulfillment/rebuild",
		"fulfillment/retire",
		"fulfillment/stream",
		"fulfillment/survey",
		"internal/pg",
		"internal/retry",
		"internal/telemetry",
		"internal/tracing",
		"reservation/catalog",
		"reservation/order",
	},
	"fulfillment/survey": {
		"sql", "reservation", "internal/pg", "internal/redisinfo", "internal/retry", "internal/telemetry",
		"fulfillment/audit", "reservation/catalog",
	},
	"fulfillment/stream": {"lua", "internal/retry", "internal/telemetry", "reservation/order"},
	"fulfillment/ledger": {
		"sql",
		"reservation",
		"fulfillment/stream",
		"internal/pg",
		"internal/crashpoint",
		"internal/retry",
		"internal/telemetry",
		"internal/tracing",
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
		"internal/progress",
		"internal/retry",
		"internal/telemetry",
		"internal/tracing",
		"reservation/order",
	},
	"fulfillment/retire": {
		"sql",
		"reservation",
		"fulfillment/deadletter",
		"fulfillment/ledger",
		"fulfillment/stream",
		"internal/pg",
		"internal/retry",
		"reservation/catalog",
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
		"internal/retry",
		"internal/tracing",
		"reservation/order",
	},
	"fulfillment/deadletter": {
		"sql", "reservation", "fulfillment/ledger", "fulfillment/stream", "internal/pg", "reservation/order",
	},
	"fulfillment/projection": {
		"sql",
		"fulfillment/ledger",
		"internal/crashpoint",
		"internal/figure",
		"internal/pg",
		"internal/progress",
		"internal/retry",
		"reservation/order",
	},
	"dashboard/fleet":   {"sql", "internal/figure", "internal/redisinfo", "reservation", "reservation/catalog"},
	"dashboard/session": {"internal/operators"},
	"dashboard/live":    {},
	"dashboard": {
		"sql",
		"reservation",
		"dashboard/fleet",
		"dashboard/live",
		"dashboard/session",
		"docs",
		"fulfillment/audit",
		"fulfillment/deadletter",
		"fulfillment/ledger",
		"fulfillment/rebuild",
		"fulfillment/stream",
		"internal/accept",
		"internal/figure",
		"internal/forwarded",
		"internal/operators",
		"internal/pg",
		"internal/ratelimit",
		"internal/telemetry",
		"reservation/catalog",
		"reservation/order",
	},
	"docs":          {},
	"relay/feed":    {"sql", "reservation/order"},
	"relay/target":  {"sql", "relay/feed"},
	"relay/webhook": {"relay/feed"},
	"relay/broker":  {"relay/feed"},
	"relay": {
		"lock",
		"reservation",
		"internal/connect",
		"internal/crashpoint",
		"internal/retry",
		"internal/telemetry",
		"internal/tracing",
		"relay/broker",
		"relay/feed",
		"relay/target",
		"relay/webhook",
	},
	"fulfillment/archive": {
		"sql",
		"reservation",
		"fulfillment/projection",
		"internal/crashpoint",
		"internal/figure",
		"internal/pg",
		"internal/progress",
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
		"internal/pg",
		"internal/progress",
		"internal/retry",
		"reservation/catalog",
		"reservation/order",
	},
}

// wirers combine the roles in one process, and may import every package that they run.
var wirers = []string{"internal/demo"}

// roles may only be imported by wirers and commands.
var roles = []string{"ingress", "fulfillment", "relay", "dashboard"}

// forTests are never part of a program.
var forTests = []string{
	"internal/testkit", "internal/testsale", "internal/testshop", "internal/testwork", "internal/testbrowser",
	"internal/arch",
	"internal/docs",
}

// banned are functions that no file may call, each with its alternative.
var banned = []struct{ pkg, function, instead string }{
	{"context", "TODO", "pass the caller's context"},
	{"time", "Sleep", "wait for a state, or for a timer and the context"},
}

// mayCall exempts the loop that waits for a state in all tests.
var mayCall = map[string]string{"internal/testkit/eventually.go": "time.Sleep"}

// violation returns why package from may not import package to, "" if it may.
func violation(from, to string) string {
	isCommand := within(from, "cmd")
	switch {
	case slices.Contains(forTests, from):
		return ""
	case slices.Contains(forTests, to):
		return "is for tests only"
	case within(to, "cmd") && !isCommand:
		return "is a command"
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
