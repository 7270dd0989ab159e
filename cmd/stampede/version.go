package main

import (
	"stampede/internal/telemetry"
)

type versionCmd struct{ outputFlag }

func (c *versionCmd) Run(s *streams) error {
	version := telemetry.BuildVersion()
	return c.print(s.out, struct {
		Version string `json:"version"`
	}{version}, "stampede %s\n", version)
}
