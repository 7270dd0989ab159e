// Package lua holds the scripts that Redis runs atomically, one file per script.
//
// Every file opens with a header that lists its KEYS, its ARGV and all of its answers. The header is
// the contract of the script, and the tests compare the two. The scripts use only commands of Redis
// 7.0 and Valkey, and only keys of one slot.
package lua

import (
	_ "embed"
	"strconv"

	"github.com/redis/go-redis/v9"
)

var (
	//go:embed reserve.lua
	reserveSource string
	//go:embed open.lua
	openSource string
	//go:embed pause.lua
	pauseSource string
	//go:embed resume.lua
	resumeSource string
	//go:embed offers_only.lua
	offersOnlySource string
	//go:embed waitlist.lua
	waitlistSource string
	//go:embed end.lua
	endSource string
	//go:embed retire.lua
	retireSource string
	//go:embed restock.lua
	restockSource string
	//go:embed restock_items.lua
	restockItemsSource string
	//go:embed put_back.lua
	putBackSource string
	//go:embed give.lua
	giveSource string
	//go:embed take.lua
	takeSource string
	//go:embed count.lua
	countSource string
	//go:embed release.lua
	releaseSource string
	//go:embed withdraw.lua
	withdrawSource string
	//go:embed append.lua
	appendSource string
	//go:embed note.lua
	noteSource string
	//go:embed look.lua
	lookSource string
	//go:embed rights.lua
	rightsSource string
	//go:embed verify.lua
	verifySource string
	//go:embed close.lua
	closeSource string
	//go:embed rebuilt.lua
	rebuiltSource string
	//go:embed lock_acquire.lua
	lockAcquireSource string
	//go:embed lock_release.lua
	lockReleaseSource string
	//go:embed lock_renew.lua
	lockRenewSource string
	//go:embed lock_force.lua
	lockForceSource string
	//go:embed keep.lua
	keepSource string
	//go:embed reap.lua
	reapSource string
	//go:embed trim.lua
	trimSource string
	//go:embed clock.lua
	clockSource string
	//go:embed set_aside.lua
	setAsideSource string
)

// Each script is sent by its SHA-1, and by its source if the server answers NOSCRIPT, as after a
// restart or a promotion. All are safe for concurrent use.
var (
	Reserve      = redis.NewScript(reserveSource)
	Open         = redis.NewScript(openSource)
	Pause        = redis.NewScript(pauseSource)
	Resume       = redis.NewScript(resumeSource)
	OffersOnly   = redis.NewScript(offersOnlySource)
	Waitlist     = redis.NewScript(waitlistSource)
	End          = redis.NewScript(endSource)
	Retire       = redis.NewScript(retireSource)
	Restock      = redis.NewScript(restockSource)
	RestockItems = redis.NewScript(restockItemsSource)
	PutBack      = redis.NewScript(putBackSource)
	Release      = redis.NewScript(releaseSource)
	Withdraw     = redis.NewScript(withdrawSource)
	Append       = redis.NewScript(appendSource)
	Note         = redis.NewScript(noteSource)

	Look    = redis.NewScript(lookSource)
	Rights  = redis.NewScript(rightsSource)
	Verify  = redis.NewScript(verifySource)
	Close   = redis.NewScript(closeSource)
	Rebuilt = redis.NewScript(rebuiltSource)

	LockAcquire = redis.NewScript(lockAcquireSource)
	LockRelease = redis.NewScript(lockReleaseSource)
	LockRenew   = redis.NewScript(lockRenewSource)
	LockForce   = redis.NewScript(lockForceSource)

	Keep     = redis.NewScript(keepSource)
	Reap     = redis.NewScript(reapSource)
	Trim     = redis.NewScript(trimSource)
	Clock    = redis.NewScript(clockSource)
	SetAside = redis.NewScript(setAsideSource)
)

// Fenced are scripts that a client may run only on a server that it has verified. Redis runs a script by
// its hash only after a client has loaded it, and the hash is another one for each fence. So loading them
// admits all callers of the same fence, and on any other server they are answered NOSCRIPT.
type Fenced struct{ Reserve, Give, Take, Count FencedScript }

// FencedScript is not a redis.Script, which forgets its hash if it is loaded in a transaction.
type FencedScript struct{ Source, Hash string }

// FencedBy returns the scripts of a fence.
func FencedBy(fence string) Fenced {
	script := func(source string) FencedScript {
		source += "-- " + strconv.Quote(fence) + "\n"
		return FencedScript{source, redis.NewScript(source).Hash()}
	}
	return Fenced{script(reserveSource), script(giveSource), script(takeSource), script(countSource)}
}

// All returns the scripts.
func (f Fenced) All() []FencedScript { return []FencedScript{f.Reserve, f.Give, f.Take, f.Count} }
