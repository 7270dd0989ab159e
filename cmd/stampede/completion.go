package main

import "embed"

//go:embed completion/stampede.*
var completionScripts embed.FS

// completionCmd prints a small script, which asks completeCmd for each completion.
type completionCmd struct {
	Shell string `arg:"" enum:"bash,zsh,fish" help:"Shell: bash, zsh or fish."`
}

func (c *completionCmd) Run(s *streams) error {
	script, err := completionScripts.ReadFile("completion/stampede." + c.Shell)
	if err != nil {
		return err
	}
	_, err = s.out.Write(script)
	return err
}
