package child_test

import (
	"os"
	"runtime"
	"strconv"
	"syscall"
	"testing"
	"time"

	"stampede/internal/test/testkit"
)

func TestChildOutlivesCallingThread(t *testing.T) {
	t.Parallel()
	started := make(chan echo)
	threads := make(chan int, 1)
	var start func()
	start = func() {
		runtime.LockOSThread()
		if syscall.Gettid() == syscall.Getpid() {
			// Go never ends the main thread. While it is locked here, start runs on another one.
			defer runtime.UnlockOSThread()
			done := make(chan struct{})
			go func() {
				defer close(done)
				start()
			}()
			<-done
			return
		}
		// The thread stays locked, so it ends with this goroutine.
		threads <- syscall.Gettid()
		started <- startEcho(t, "exec cat")
	}
	go start()
	child, thread := <-started, <-threads
	testkit.Eventually(t, 30*time.Second, "the thread has ended", func() bool {
		_, err := os.Stat("/proc/self/task/" + strconv.Itoa(thread))
		return os.IsNotExist(err)
	})
	child.answers(t)
}
