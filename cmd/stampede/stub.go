package main

type auditCmd struct{}

func (c *auditCmd) Run() error { return nil }
