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

// Each is sent by its SHA-1, and by its source where Redis does not know it yet.
var (
	unlockScript     = redis.NewScript(unlockSource)
	takeScript       = redis.NewScript(takeSource)
	takeStreamScript = redis.NewScript(takeStreamSource)
)
