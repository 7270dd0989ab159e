package child

import "syscall"

func signalOrphan(attr *syscall.SysProcAttr, s syscall.Signal) { attr.Pdeathsig = s }
