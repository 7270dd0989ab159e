package main

import "syscall"

// ownGroup keeps Ctrl-C from the child: it is stopped once, by the shop. A killed shop takes it along.
func ownGroup() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGINT}
}
