// Package rebuild rebuilds the stock in Redis from Postgres after Redis lost it, or was set back or
// replaced.
//
// Each worker calls Rebuilder.HealPartition (heal.go) periodically: needs.go finds what has to be rebuilt, and
// proof.go uses what workers have noticed; behind.go keeps how many orders Postgres lacks. A rebuild
// takes a lock (session.go), closes the sale, records
// what the stream still has (drain.go), raises the epoch, copies the live orders (buyers.go) and
// opens the sale (steps.go, rebuild.go); progress.go logs what it waits for.
package rebuild
