package localserver

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

const (
	lockSuffix = ".lock"
	// sweepMax bounds how many folders of dead processes one start removes. Each takes about 20 ms; later
	// starts remove the rest.
	sweepMax = 8
)

// serverFolder is the temporary folder of one server. It is in use while a process has its lock file
// open. The server inherits that file, so the lock is free only when both the process that started
// the server and the server itself have ended.
type serverFolder struct {
	path string
	lock *os.File
}

// newFolder creates a folder for one server and removes some folders of dead processes.
func newFolder(name string, a account) (*serverFolder, error) {
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
		if errors.Is(err, errLocked) { // by a sweep between the two calls, which removes it
			_ = lock.Close()
			continue
		}
		f := &serverFolder{path: strings.TrimSuffix(lock.Name(), lockSuffix), lock: lock}
		if err == nil {
			err = os.Mkdir(f.path, 0o700)
		}
		if err == nil {
			err = a.own(f.path)
		}
		if err != nil {
			f.remove()
			return nil, fmt.Errorf("create a folder for %s: %w", name, err)
		}
		return f, nil
	}
}

// remove removes the folder, and the lock file last, because sweep searches for lock files.
func (f *serverFolder) remove() {
	// A later start sweeps what cannot be removed now.
	if os.RemoveAll(f.path) == nil {
		_ = os.Remove(f.lock.Name())
	}
	_ = f.lock.Close()
}

// sweep removes folders whose processes have ended.
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
		(&serverFolder{path: strings.TrimSuffix(path, lockSuffix), lock: lock}).remove()
		swept++
	}
}

var errLocked = errors.New("locked by another process")

// lockFile locks a file. It returns errLocked also if the file was removed before.
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

// baseFolder creates the folder for all servers of this user. Only this user may be able to write it: in a
// public temporary folder another user may have created it.
func baseFolder(a account) (string, error) {
	parents := []string{os.TempDir(), "/tmp", "/var/tmp"}
	for _, parent := range parents {
		parent, err := filepath.Abs(parent)
		if err != nil || !a.reaches(parent) {
			continue
		}
		base := filepath.Join(parent, fmt.Sprintf("stampede-%d", os.Geteuid()))
		// Others, such as the account of the servers, may enter the folder but not list it.
		if err := os.Mkdir(base, 0o711); err != nil && !errors.Is(err, os.ErrExist) {
			return "", err
		}
		info, err := os.Lstat(base)
		if err != nil {
			return "", err
		}
		stat, ok := info.Sys().(*syscall.Stat_t)
		if !ok || !info.IsDir() || int(stat.Uid) != os.Geteuid() || info.Mode().Perm()&0o022 != 0 {
			return "", fmt.Errorf("%s is not a folder that only this user can write: remove it, or set TMPDIR", base)
		}
		return base, nil
	}
	return "", fmt.Errorf("the account of the servers can reach none of %s: set TMPDIR",
		strings.Join(parents, ", "))
}

// account is the user of the server processes.
type account struct {
	// credential is nil if the servers run as the user of this process.
	credential *syscall.Credential
}

// serverAccount chooses the user of the servers. Postgres refuses to run as root, and Redis does not need it.
func serverAccount() (account, error) {
	if os.Geteuid() != 0 {
		return account{}, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, errUID := strconv.ParseUint(u.Uid, 10, 32)
		gid, errGID := strconv.ParseUint(u.Gid, 10, 32)
		if err := errors.Join(errUID, errGID); err != nil {
			return account{}, fmt.Errorf("ids of user %s: %w", name, err)
		}
		return account{credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}, nil
	}
	return account{}, errors.New("neither user postgres nor user nobody exists, and Postgres does not run as root")
}

// own makes the account the owner of path and everything below it.
func (a account) own(path string) error {
	if a.credential == nil {
		return nil
	}
	return filepath.WalkDir(path, func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(path, int(a.credential.Uid), int(a.credential.Gid))
	})
}

// reaches reports whether the account can open files below folder. It is not checked for the user of this process,
// because creating a file fails then.
func (a account) reaches(folder string) bool {
	if a.credential == nil {
		return true
	}
	for {
		info, err := os.Stat(folder)
		if err != nil || info.Mode().Perm()&0o001 == 0 {
			return false
		}
		parent := filepath.Dir(folder)
		if parent == folder {
			return true
		}
		folder = parent
	}
}
