package main

import (
	"fmt"

	"stampede/internal/telemetry"
)

type versionCmd struct{}

func (c *versionCmd) Run(s *streams) error {
	_, err := fmt.Fprintln(s.out, "stampede", telemetry.BuildVersion())
	return err
}
