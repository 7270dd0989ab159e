// Package child runs child processes that do not outlive their parent, however it ends: a private
// server that survived a SIGKILL of its owner would hold its port and its memory until somebody
// found it.
package child

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// reapDelay is how long after the end of a child its output may be kept open by its own children
// (Postgres's backends notice the loss of their parent, but not in the same instant).
const reapDelay = 2 * time.Second

// Process is a started child. It is safe for concurrent use.
type Process struct {
	cmd  *exec.Cmd
	done chan struct{}
	err  error // what cmd.Wait returned; set before done is closed
}

// Start starts cmd in a process group of its own, so that a Ctrl-C in the terminal reaches the
// parent alone and the parent decides in which order its children stop. On Linux the kernel sends
// the child onOrphan when the parent is gone; elsewhere a killed parent leaves its children behind.
func Start(cmd *exec.Cmd, onOrphan syscall.Signal) (*Process, error) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	signalOrphan(cmd.SysProcAttr, onOrphan)
	if cmd.WaitDelay == 0 {
		cmd.WaitDelay = reapDelay
	}
	p := &Process{cmd: cmd, done: make(chan struct{})}
	started := make(chan error)
	go func() {
		// The kernel counts the thread that forked as the parent, not the process, and Go ends
		// threads as it likes: so this one is kept until the child is gone.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		p.err = cmd.Wait()
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	return p, nil
}

// Pid is the child's process id.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Done is closed when the child has ended and its output is complete.
func (p *Process) Done() <-chan struct{} { return p.done }

// Wait waits for the end of the child and returns its error as exec.Cmd.Wait does.
func (p *Process) Wait() error {
	<-p.done
	return p.err
}

// Signal sends the child a signal; to a child that has ended it does nothing.
func (p *Process) Signal(s os.Signal) {
	// The one error there can be is that the child has ended.
	_ = p.cmd.Process.Signal(s)
}

// Stop sends the child a signal and waits for its end. A child that is still there after patience
// is killed.
func (p *Process) Stop(s os.Signal, patience time.Duration) {
	p.Signal(s)
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-p.done:
	case <-timer.C:
		p.Signal(os.Kill)
		<-p.done
	}
}
