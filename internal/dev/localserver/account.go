package localserver

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
)

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
