//go:build !linux

package child

import "syscall"

func signalOrphan(*syscall.SysProcAttr, syscall.Signal) {}
