package localserver

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

const (
	lockSuffix = ".lock"
	// sweepMax bounds how many folders of dead processes one start removes: at some 20 ms each it
	// must stay short beside the start itself, and what is left over goes with the next starts.
	sweepMax = 8
)

// folder is the temporary folder of one server. It is in use for as long as anyone has its lock
// file open, and the server inherits that file: so a folder whose lock can be taken belongs to
// nobody any more, neither to a process that started a server nor to a server that is still
// shutting down after its parent was killed.
type folder struct {
	path string
	lock *os.File
}

// newFolder makes a folder for one server and removes some that dead processes left behind.
func newFolder(name string, a account) (*folder, error) {
	base, err := baseFolder(a)
	if err != nil {
		return nil, err
	}
	sweep(base)
	for {
		lock, err := os.CreateTemp(base, name+"-*"+lockSuffix)
		if err != nil {
			return nil, err
		}
		err = lockFile(lock)
		if errors.Is(err, errLocked) { // by a sweep that came between the two calls, and is removing it
			_ = lock.Close()
			continue
		}
		f := &folder{path: strings.TrimSuffix(lock.Name(), lockSuffix), lock: lock}
		if err == nil {
			err = os.Mkdir(f.path, 0o700)
		}
		if err == nil {
			err = a.own(f.path)
		}
		if err != nil {
			f.remove()
			return nil, fmt.Errorf("make a folder for %s: %w", name, err)
		}
		return f, nil
	}
}

// remove removes the folder. The lock file goes last: it is what a sweep looks for.
func (f *folder) remove() {
	// What cannot be removed now is swept by a later start.
	if os.RemoveAll(f.path) == nil {
		_ = os.Remove(f.lock.Name())
	}
	_ = f.lock.Close()
}

// sweep removes folders whose owners and servers are gone.
func sweep(base string) {
	locks, err := filepath.Glob(filepath.Join(base, "*"+lockSuffix))
	if err != nil {
		return // Glob fails for malformed patterns only
	}
	swept := 0
	for _, path := range locks {
		if swept == sweepMax {
			return
		}
		lock, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			continue
		}
		if lockFile(lock) != nil {
			_ = lock.Close()
			continue
		}
		(&folder{path: strings.TrimSuffix(path, lockSuffix), lock: lock}).remove()
		swept++
	}
}

var errLocked = errors.New("locked by another")

// lockFile takes the lock of a file; errLocked also where the file was removed before that.
func lockFile(f *os.File) error {
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return errLocked
		}
		return fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	var stat syscall.Stat_t
	if err := syscall.Fstat(int(f.Fd()), &stat); err != nil {
		return fmt.Errorf("stat %s: %w", f.Name(), err)
	}
	if stat.Nlink == 0 {
		return errLocked
	}
	return nil
}

// baseFolder makes the folder that holds those of all servers of this user. It must be ours alone:
// in a temporary folder that everybody can write, somebody else may have made it first.
func baseFolder(a account) (string, error) {
	parents := []string{os.TempDir(), "/tmp", "/var/tmp"}
	for _, parent := range parents {
		parent, err := filepath.Abs(parent)
		if err != nil || !a.reaches(parent) {
			continue
		}
		base := filepath.Join(parent, fmt.Sprintf("stampede-%d", os.Geteuid()))
		// Others may pass through, as the account of the servers must, but not look around.
		if err := os.Mkdir(base, 0o711); err != nil && !errors.Is(err, os.ErrExist) {
			return "", err
		}
		info, err := os.Lstat(base)
		if err != nil {
			return "", err
		}
		stat, ok := info.Sys().(*syscall.Stat_t)
		if !ok || !info.IsDir() || int(stat.Uid) != os.Geteuid() || info.Mode().Perm()&0o022 != 0 {
			return "", fmt.Errorf("%s exists, but is no folder that only this user can write: remove it, or set TMPDIR", base)
		}
		return base, nil
	}
	return "", fmt.Errorf("none of %s can be reached by the account that the servers run as: set TMPDIR",
		strings.Join(parents, ", "))
}
