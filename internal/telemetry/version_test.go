package telemetry

import (
	"runtime/debug"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestVersionFromBuildInfo(t *testing.T) {
	commit := debug.BuildSetting{Key: "vcs.revision", Value: "0123456789abcdef0123456789abcdef01234567"}
	clean, dirty := debug.BuildSetting{Key: "vcs.modified", Value: "false"},
		debug.BuildSetting{Key: "vcs.modified", Value: "true"}
	for want, info := range map[string]*debug.BuildInfo{
		"v1.2.3":                   {Main: debug.Module{Version: "v1.2.3"}, Settings: []debug.BuildSetting{commit}},
		"devel":                    {Main: debug.Module{Version: "(devel)"}},
		"devel-0123456789ab":       {Settings: []debug.BuildSetting{commit, clean}},
		"devel-0123456789ab+dirty": {Main: debug.Module{Version: "(devel)"}, Settings: []debug.BuildSetting{commit, dirty}},
	} {
		assert.Equal(t, want, versionFrom(info))
	}
	assert.NotEmpty(t, BuildVersion())
}

func TestBuildVersionOfRelease(t *testing.T) {
	version = "v9.9.9"
	defer func() { version = "" }()
	assert.Equal(t, "v9.9.9", BuildVersion())
}
