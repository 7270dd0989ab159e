//go:build !linux

package main

import "syscall"

// ownGroup keeps Ctrl-C from the child: it is stopped once, by the shop.
func ownGroup() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
