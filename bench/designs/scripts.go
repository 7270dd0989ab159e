package designs

import (
	_ "embed"

	"github.com/redis/go-redis/v9"
)

var (
	//go:embed lua/unlock.lua
	unlockSource string
	//go:embed lua/take.lua
	takeSource string
	//go:embed lua/take_stream.lua
	takeStreamSource string
)

// Scripts are called by SHA-1, and sent as source if Redis does not know them.
var (
	unlockScript     = redis.NewScript(unlockSource)
	takeScript       = redis.NewScript(takeSource)
	takeStreamScript = redis.NewScript(takeStreamSource)
)
