package arch

import (
	"slices"
	"strings"
)

// fileLinesMax bounds a file: a longer one usually has more than one purpose.
const fileLinesMax = 550

// rooms are the top-level folders in the order of their layers, each with the rooms above it in this list that it may
// import. The stores come first, the roles after them. No role imports another: they communicate only through Redis
// and Postgres, so that each runs without the others.
var rooms = []room{
	{"docs", nil},
	{"lua", nil},
	{"sql", nil},
	{libraries, []string{"sql"}},
	{"lock", []string{"lua"}},
	{"reservation", []string{"lua", "sql", libraries}},
	{"draw", []string{"reservation"}},
	{"stream", []string{"lua", "reservation", libraries}},
	{"ledger", []string{"sql", "reservation", "draw", "stream", libraries}},
	{"upkeep", []string{"lua", "sql", "reservation", "draw", "stream", "ledger", libraries}},
	{"ingress", []string{"reservation", "draw", "ledger", libraries}},
	{"fulfillment", []string{"sql", "lock", "reservation", "stream", "ledger", "upkeep", libraries}},
	{events, []string{"sql", "reservation", libraries}},
	{targets, []string{"sql", events}},
	{"relay", []string{"sql", "lock", "reservation", events, targets, libraries}},
	{"dashboard", []string{"docs", "sql", "reservation", "draw", "stream", "ledger", targets, "upkeep", libraries}},
	{client, []string{"reservation", "draw", "ledger", libraries}},
	{development, []string{"sql", "reservation", "draw", "stream", "ledger", "upkeep", client, libraries}},
	{"cmd", []string{
		"sql", "reservation", "draw", "ledger", "upkeep", "ingress", "fulfillment", targets, "relay", "dashboard",
		client, development, libraries,
	}},
}

type room struct {
	name string
	may  []string
}

const (
	libraries = "internal"
	// events and targets are the relay's side of Postgres.
	events, targets = "relay/feed", "relay/target"
	// client is the client of the HTTP API.
	client = "internal/apiclient"
	// development is what runs the product on one machine, and a crowd against it.
	development = "internal/dev"
	// tests is never part of a program, and may import every room.
	tests = "internal/test"
)

// banned are functions that no file may call, each with its alternative.
var banned = []struct{ pkg, function, instead string }{
	{"context", "TODO", "pass the caller's context"},
	{"time", "Sleep", "wait for a state, or for a timer and the context"},
}

// mayCall exempts the loop that waits for a state in all tests.
var mayCall = map[string]string{"internal/test/testkit/eventually.go": "time.Sleep"}

// owned are texts that the programs have in one file, each with what others call.
var owned = []struct{ text, file, instead string }{
	{"text/event-stream", "internal/accept/server.go", "call accept.EventStream, so that no gateway holds the stream back"},
}

// violation returns why package from may not import package to, "" if it may.
func violation(from, to string) string {
	importer, imported := findRoom(from), findRoom(to)
	here := slices.IndexFunc(rooms, func(r room) bool { return r.name == importer })
	switch {
	case importer == imported || importer == tests:
		return ""
	case imported == tests:
		return "is for tests only"
	case here < 0:
		return "needs a rule in internal/test/arch: this room has none"
	case !slices.Contains(rooms[here].may, imported),
		!slices.ContainsFunc(rooms[:here], func(r room) bool { return r.name == imported }):
		return "points the wrong way"
	}
	return ""
}

// findRoom returns the room of a package.
func findRoom(folder string) string {
	for _, nested := range []string{client, development, tests, events, targets} {
		if strings.HasPrefix(folder+"/", nested+"/") {
			return nested
		}
	}
	top, _, _ := strings.Cut(folder, "/")
	return top
}
