package child_test

import (
	"os"
	"runtime"
	"strconv"
	"syscall"
	"testing"
	"time"

	"stampede/internal/testkit"
)

func TestChildOutlivesTheThreadThatAskedForIt(t *testing.T) {
	t.Parallel()
	started := make(chan echo)
	threads := make(chan int, 1)
	var ask func()
	ask = func() {
		runtime.LockOSThread()
		if syscall.Gettid() == syscall.Getpid() {
			// Go never ends the main thread. While it is held here, ask gets another one.
			defer runtime.UnlockOSThread()
			done := make(chan struct{})
			go func() {
				defer close(done)
				ask()
			}()
			<-done
			return
		}
		// The thread stays locked, and so ends with this goroutine.
		threads <- syscall.Gettid()
		started <- startEcho(t, "exec cat")
	}
	go ask()
	child, thread := <-started, <-threads
	testkit.Eventually(t, 10*time.Second, "the thread is gone", func() bool {
		_, err := os.Stat("/proc/self/task/" + strconv.Itoa(thread))
		return os.IsNotExist(err)
	})
	child.answers(t)
}
