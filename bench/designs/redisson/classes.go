// Package redisson uses a real Redisson, in a Java process that takes and releases locks as it is told:
// lock/testdata/redisson, whose Driver.java says how.
package redisson

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
)

// program is where the Java program is, from the root of the repository, and pom what Maven reads there.
var program = filepath.Join("lock", "testdata", "redisson")

const pom = "pom.xml"

// Classes compiles the Java program if it was changed, and returns its class path. The error says
// what is missing where that is not possible.
var Classes = sync.OnceValues(func() (string, error) {
	for _, tool := range []string{"java", "mvn"} {
		if _, err := exec.LookPath(tool); err != nil {
			return "", fmt.Errorf("there is no %s here", tool)
		}
	}
	folder, err := folder()
	if err != nil {
		return "", err
	}
	unlock, err := lockFolder(folder)
	if err != nil {
		return "", err
	}
	defer unlock()
	if isCompiled(folder) {
		return compiled(folder)
	}
	maven := exec.Command("mvn", "--quiet", "--batch-mode", "compile")
	maven.Dir = folder
	if output, err := maven.CombinedOutput(); err != nil {
		return "", fmt.Errorf("mvn compile: %w\n%s", err, output)
	}
	if err := os.WriteFile(filepath.Join(folder, target, stamp), nil, 0o644); err != nil {
		return "", err
	}
	return compiled(folder)
})

// stamp is written when Maven is done, in target, which is its folder: to ask it whether there is anything to
// do takes seconds each time.
const (
	target = "target"
	stamp  = "compiled"
)

// isCompiled tells whether the program was compiled after it was last changed, and all its libraries are there.
func isCompiled(folder string) bool {
	done, err := os.Stat(filepath.Join(folder, target, stamp))
	if err != nil {
		return false
	}
	classPath, err := compiled(folder)
	if err != nil {
		return false
	}
	for _, path := range filepath.SplitList(classPath) {
		if _, err := os.Stat(path); err != nil {
			return false
		}
	}
	changed := false
	err = filepath.WalkDir(folder, func(_ string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() && entry.Name() == target {
			return fs.SkipDir
		}
		info, err := entry.Info()
		changed = changed || err == nil && !info.ModTime().Before(done.ModTime())
		return err
	})
	return err == nil && !changed
}

// lockFolder keeps other processes from compiling at the same time: the tests of several packages do.
func lockFolder(folder string) (unlock func(), err error) {
	file, err := os.Open(filepath.Join(folder, pom))
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX); err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("lock %s: %w", file.Name(), err)
	}
	return func() { _ = file.Close() }, nil // which unlocks it
}

// Compiled is the class path of the program that Classes has compiled, in this process or in another one.
func Compiled() (string, error) {
	folder, err := folder()
	if err != nil {
		return "", err
	}
	return compiled(folder)
}

func compiled(folder string) (string, error) {
	made := filepath.Join(folder, target)
	libraries, err := os.ReadFile(filepath.Join(made, "classpath"))
	if err != nil {
		return "", fmt.Errorf("the Java program is not compiled: %w", err)
	}
	return filepath.Join(made, "classes") + string(os.PathListSeparator) + strings.TrimSpace(string(libraries)), nil
}

// Version is the Redisson that the program is compiled with, or "".
func Version() string {
	folder, err := folder()
	if err != nil {
		return ""
	}
	text, err := os.ReadFile(filepath.Join(folder, pom))
	if err != nil {
		return ""
	}
	_, rest, _ := strings.Cut(string(text), "<artifactId>redisson</artifactId>")
	_, rest, _ = strings.Cut(rest, "<version>")
	version, _, _ := strings.Cut(rest, "</version>")
	return version
}

// folder looks for the program upwards from where the process runs: benchmarks do in their package's folder.
func folder() (string, error) {
	at, err := os.Getwd()
	for ; err == nil; at = filepath.Dir(at) {
		found := filepath.Join(at, program)
		if _, err := os.Stat(filepath.Join(found, pom)); err == nil {
			return found, nil
		}
		if at == filepath.Dir(at) {
			err = errors.New("there is no " + program + " above")
		}
	}
	return "", err
}
