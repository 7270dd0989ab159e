// Package redisson runs a real Redisson in a Java process that takes and releases locks on command.
// lock/testdata/redisson/…/Driver.java describes the commands.
package redisson

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
)

// programPath is the folder of the Java program in the repository, and pom its Maven file.
var programPath = filepath.Join("lock", "testdata", "redisson")

const pom = "pom.xml"

// Compile compiles what has changed of the Java program, and returns its class path. The error says
// what is missing if that is not possible.
var Compile = sync.OnceValues(func() (string, error) {
	for _, tool := range []string{"java", "mvn"} {
		if _, err := exec.LookPath(tool); err != nil {
			return "", fmt.Errorf("%s is not installed", tool)
		}
	}
	folder, err := findFolder()
	if err != nil {
		return "", err
	}
	unlock, err := lockFolder(folder)
	if err != nil {
		return "", err
	}
	defer unlock()
	maven := exec.Command("mvn", "--quiet", "--batch-mode", "compile")
	maven.Dir = folder
	if output, err := maven.CombinedOutput(); err != nil {
		return "", fmt.Errorf("mvn compile: %w\n%s", err, output)
	}
	return readClassPath(folder)
})

// lockFolder prevents concurrent builds: the tests of several packages compile the program.
func lockFolder(folder string) (unlock func(), err error) {
	file, err := os.Open(filepath.Join(folder, pom))
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX); err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("lock %s: %w", file.Name(), err)
	}
	return func() { _ = file.Close() }, nil // unlocks it
}

// ClassPath is the class path of the program that Compile has built, in this process or another one.
func ClassPath() (string, error) {
	folder, err := findFolder()
	if err != nil {
		return "", err
	}
	return readClassPath(folder)
}

func readClassPath(folder string) (string, error) {
	output := filepath.Join(folder, "target")
	libraries, err := os.ReadFile(filepath.Join(output, "classpath"))
	if err != nil {
		return "", fmt.Errorf("the Java program is not compiled: %w", err)
	}
	return filepath.Join(output, "classes") + string(os.PathListSeparator) + strings.TrimSpace(string(libraries)), nil
}

// Version is the version of Redisson in the program, or "".
func Version() string {
	folder, err := findFolder()
	if err != nil {
		return ""
	}
	text, err := os.ReadFile(filepath.Join(folder, pom))
	if err != nil {
		return ""
	}
	_, rest, _ := strings.Cut(string(text), "<redisson.version>")
	version, _, _ := strings.Cut(rest, "</redisson.version>")
	return version
}

// findFolder looks for the program in the working directory and above: benchmarks run in the folder of
// their package.
func findFolder() (string, error) {
	at, err := os.Getwd()
	for ; err == nil; at = filepath.Dir(at) {
		found := filepath.Join(at, programPath)
		if _, err := os.Stat(filepath.Join(found, pom)); err == nil {
			return found, nil
		}
		if at == filepath.Dir(at) {
			err = errors.New("no folder " + programPath + " in a parent of the working directory")
		}
	}
	return "", err
}
