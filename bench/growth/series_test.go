package growth

import "time"

// plan is one sale, or several at the same time.
type plan struct {
	// stock is the units of all sales together, and buyers the number of buyers, who each buy one unit
	// once. If both are 0, stock and buyers are unlimited within the duration.
	stock, buyers int
	duration      time.Duration
	connections   int
	workers       int // processes of `stampede work`
	partitions    int
	sales         int
	longIDs       bool // user ids are UUIDs, instead of a word and a number
}

// defaultPlan holds the settings that a series does not vary.
func defaultPlan() plan { return plan{connections: 256, workers: 1, partitions: 1, sales: 1} }

// series varies one setting.
type series struct {
	grows string
	note  string
	at    []int
	plan  func(at int) plan
}
