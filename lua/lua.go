// Package lua holds the scripts that Redis runs atomically, one file per script.
//
// Every file opens with a header that lists its KEYS, its ARGV and all of its answers. The header is
// the contract of the script, and the tests compare the two. The scripts use only commands of Redis
// 7.0 and Valkey, and only keys of one slot.
package lua

import (
	"embed"
	"strconv"

	"github.com/redis/go-redis/v9"
)

//go:embed *.lua
var files embed.FS

// source returns the text of a script.
func source(name string) string {
	text, err := files.ReadFile(name + ".lua")
	if err != nil {
		panic(err) // at the start of each program and test
	}
	return string(text)
}

func script(name string) *redis.Script { return redis.NewScript(source(name)) }

// Each script is sent by its SHA-1, and by its source if the server answers NOSCRIPT, as after a
// restart or a promotion. All are safe for concurrent use.
var (
	Reserve      = script("reserve")
	Open         = script("open")
	Change       = script("change")
	Waitlist     = script("waitlist")
	Retire       = script("retire")
	Restock      = script("restock")
	RestockItems = script("restock_items")
	PutBack      = script("put_back")
	Release      = script("release")
	Withdraw     = script("withdraw")
	Append       = script("append")

	Look    = script("look")
	Rights  = script("rights")
	Verify  = script("verify")
	Close   = script("close")
	Rebuilt = script("rebuilt")

	LockAcquire = script("lock_acquire")
	LockRelease = script("lock_release")
	LockRenew   = script("lock_renew")
	LockForce   = script("lock_force")

	Keep     = script("keep")
	Reap     = script("reap")
	Trim     = script("trim")
	Announce = script("announce")
	Clock    = script("clock")
	Probe    = script("probe")
	SetAside = script("set_aside")
)

// Fenced are scripts that a client may run only on a server that it has verified. Redis runs a script by
// its hash only after a client has loaded it, and the hash is another one for each fence. So loading them
// admits all callers of the same fence, and on any other server they are answered NOSCRIPT.
type Fenced struct{ Reserve, Give, Take, Count FencedScript }

// FencedScript is not a redis.Script, which forgets its hash if it is loaded in a transaction.
type FencedScript struct{ Source, Hash string }

// FencedBy returns the scripts of a fence.
func FencedBy(fence string) Fenced {
	fenced := func(name string) FencedScript {
		text := source(name) + "-- " + strconv.Quote(fence) + "\n"
		return FencedScript{text, redis.NewScript(text).Hash()}
	}
	return Fenced{fenced("reserve"), fenced("give"), fenced("take"), fenced("count")}
}

// All returns the scripts.
func (f Fenced) All() []FencedScript { return []FencedScript{f.Reserve, f.Give, f.Take, f.Count} }
