// Package child runs child processes that end with their parent, even if it is killed. Otherwise a
// private server would keep its port and memory after a SIGKILL of its owner.
package child

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// reapDelay is how long the children of an ended child may keep its output open: Postgres backends end
// shortly after their parent.
const reapDelay = 2 * time.Second

// Process is a started child. It is safe for concurrent use.
type Process struct {
	cmd  *exec.Cmd
	done chan struct{}
	err  error // of cmd.Wait; set before done is closed
}

// Start starts cmd in its own process group, so that a Ctrl-C in the terminal reaches only the parent,
// which stops its children in its own order. On Linux the kernel sends onOrphan to the child when the
// parent ends; on other systems the children of a killed parent keep running.
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
		// For the kernel the parent is the thread that forked, not the process, and Go may end
		// threads: this one is kept until the child ends.
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

// Pid returns the child's process id.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Done is closed when the child has ended and its output is complete.
func (p *Process) Done() <-chan struct{} { return p.done }

// Wait waits for the end of the child and returns its error as exec.Cmd.Wait does.
func (p *Process) Wait() error {
	<-p.done
	return p.err
}

// Signal sends the child a signal. After the end of the child it does nothing.
func (p *Process) Signal(s os.Signal) {
	// The only possible error is that the child has ended.
	_ = p.cmd.Process.Signal(s)
}

// Stop sends the child a signal and waits for its end. After patience the child is killed.
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
