// Package localserver runs private Redis and Postgres servers for development and tests: children
// of this process on free ports of the loopback, with data in a temporary folder, ready within a
// second. Acknowledged writes survive a crash (appendfsync always, fsync on), so tests and the demo
// show real durability. The servers end with this process, even after a SIGKILL; a later process
// removes their folders then.
package localserver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sync/errgroup"
)

// Pair is a Redis and a Postgres.
type Pair struct {
	RedisURL    string
	DatabaseURL string
	// Redis or Cluster, and Postgres, are the private servers behind the URLs; nil for given URLs.
	Redis    *Redis
	Cluster  *Cluster
	Postgres *Postgres
}

// Wanted says what Provide has to start: a private server for each empty URL.
type Wanted struct {
	RedisURL, DatabaseURL string
	// Cluster makes the private Redis a cluster of three masters, each with a replica.
	Cluster bool
}

// Provide starts the private servers, all at the same time. The error wraps errNotInstalled if a required server is
// not installed. After an error no server runs.
func Provide(ctx context.Context, w Wanted) (*Pair, error) {
	var missing []string
	if _, found := findRedis(); w.RedisURL == "" && !found {
		missing = append(missing, redisPrograms)
	}
	if _, found := findPostgres(); w.DatabaseURL == "" && !found {
		missing = append(missing, postgresPrograms)
	}
	if len(missing) > 0 { // in one error
		return nil, notInstalled(missing...)
	}
	p := &Pair{RedisURL: w.RedisURL, DatabaseURL: w.DatabaseURL}
	var redisErr, postgresErr error
	var starting sync.WaitGroup
	switch {
	case w.RedisURL != "":
	case w.Cluster:
		starting.Go(func() { p.Cluster, redisErr = StartCluster(ctx, ClusterOptions{Masters: 3, Replicas: 1}) })
	default:
		starting.Go(func() { p.Redis, redisErr = StartRedis(ctx, RedisOptions{}) })
	}
	if w.DatabaseURL == "" {
		starting.Go(func() { p.Postgres, postgresErr = StartPostgres(ctx, PostgresOptions{}) })
	}
	starting.Wait()
	if err := errors.Join(redisErr, postgresErr); err != nil {
		p.Stop()
		return nil, err
	}
	if p.Redis != nil {
		p.RedisURL = p.Redis.URL
	}
	if p.Cluster != nil {
		p.RedisURL = p.Cluster.URL
	}
	if p.Postgres != nil {
		p.DatabaseURL = p.Postgres.URL
	}
	return p, nil
}

// Watch returns nil when ctx ends, or an error if a private server ends before. Without private servers it
// returns immediately.
func (p *Pair) Watch(ctx context.Context) error {
	watching, ctx := errgroup.WithContext(ctx)
	if p.Redis != nil {
		watching.Go(func() error { return p.Redis.server.watch(ctx) })
	}
	if p.Cluster != nil {
		watching.Go(func() error { return p.Cluster.watch(ctx) })
	}
	if p.Postgres != nil {
		watching.Go(func() error { return p.Postgres.server.watch(ctx) })
	}
	return watching.Wait()
}

// Stop stops the private servers and removes their data. Servers of given URLs keep running.
func (p *Pair) Stop() {
	var stopping sync.WaitGroup
	if p.Redis != nil {
		stopping.Go(p.Redis.Stop)
	}
	if p.Cluster != nil {
		stopping.Go(p.Cluster.Stop)
	}
	if p.Postgres != nil {
		stopping.Go(p.Postgres.Stop)
	}
	stopping.Wait()
}

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

// errNotInstalled is wrapped if the programs of a server are neither in PATH nor in the folders of
// packages. The text of the error names them and how to install them.
var errNotInstalled = errors.New("not installed")

const remedies = `do one of these:
  - sh tools/setup.sh
  - apt-get install --no-install-recommends redis-server postgresql
  - set REDIS_URL and DATABASE_URL to running servers`

// Folders outside PATH where packages install servers: Debian has one per Postgres version; the others
// are Red Hat, Homebrew on both kinds of Mac, and sbin for users without it in PATH.
var (
	postgresFolders = []string{
		"/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin",
		"/opt/homebrew/opt/postgresql@*/bin", "/usr/local/opt/postgresql@*/bin",
	}
	redisFolders = []string{"/usr/bin", "/usr/local/bin", "/usr/sbin", "/opt/homebrew/bin"}
)

// Names of the programs in the error.
const (
	redisPrograms    = "Redis (redis-server or valkey-server)"
	postgresPrograms = "Postgres (postgres and initdb)"
)

func notInstalled(missing ...string) error {
	return fmt.Errorf("%s: %w; %s", strings.Join(missing, " and "), errNotInstalled, remedies)
}

// findRedis returns the path of redis-server or valkey-server in the first folder of PATH that has one, else in the
// first folder of packages.
func findRedis() (path string, found bool) {
	for _, folder := range append(filepath.SplitList(os.Getenv("PATH")), redisFolders...) {
		if !filepath.IsAbs(folder) {
			continue // never run a program from the working directory
		}
		for _, name := range []string{"redis-server", "valkey-server"} {
			if path, err := exec.LookPath(filepath.Join(folder, name)); err == nil {
				return path, true
			}
		}
	}
	return "", false
}

// findPostgres returns the folder with the server programs: the first one in PATH, else the one of the
// newest installed version.
func findPostgres() (folder string, found bool) {
	folders := filepath.SplitList(os.Getenv("PATH"))
	for _, pattern := range postgresFolders {
		matches, _ := filepath.Glob(pattern) // fails for malformed patterns only
		slices.SortFunc(matches, func(a, b string) int { return cmp.Compare(versionIn(b), versionIn(a)) })
		folders = append(folders, matches...)
	}
	for _, folder := range folders {
		if !filepath.IsAbs(folder) {
			continue // never run a program from the working directory
		}
		_, errInit := exec.LookPath(filepath.Join(folder, "initdb"))
		_, errRun := exec.LookPath(filepath.Join(folder, "postgres"))
		if errInit == nil && errRun == nil {
			return folder, true
		}
	}
	return "", false
}

var versionPattern = regexp.MustCompile(`[0-9]+(\.[0-9]+)?`)

// versionIn returns the last version number in a path, as a number: 9.6 < 10.
func versionIn(folder string) float64 {
	found := versionPattern.FindAllString(folder, -1)
	if len(found) == 0 {
		return 0
	}
	v, _ := strconv.ParseFloat(found[len(found)-1], 64) // the pattern matches only numbers
	return v
}
