// Package rebuild makes the stock in Redis again from Postgres after Redis lost it, or was set back
// or replaced.
//
// Rebuilder.Heal (heal.go) is what each worker calls: needs.go finds what has to be rebuilt and
// proof.go what workers have noticed. A rebuild takes a lock (session.go), closes the sale, records
// what the stream still has (drain.go), raises the epoch, copies the live orders (buyers.go) and
// opens the sale (steps.go, rebuild.go); progress.go logs what it waits for.
package rebuild
