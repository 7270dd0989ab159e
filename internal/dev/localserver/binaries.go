package localserver

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

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
