// Command testrun runs go test and prints its progress: a line for each finished package, and the logs of failed
// tests only. Its arguments are those of go test. With -C FOLDER as the first ones, it tests the module in that
// folder.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	passed, err := run(ctx, os.Args[1:], os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "testrun:", err)
	}
	if err != nil || !passed {
		os.Exit(1)
	}
}

// quietMax is the time without output after which the running packages are printed.
const quietMax = 30 * time.Second

// run runs go test with the arguments, and prints a report to out. It returns whether all tests passed.
func run(ctx context.Context, args []string, out io.Writer) (passed bool, err error) {
	var folder string
	if len(args) > 1 && args[0] == "-C" {
		folder, args = args[1], args[2:]
	}
	total, err := countPackages(ctx, folder, args)
	if err != nil {
		return false, err
	}
	// Task lint vets, each package once.
	cmd := exec.CommandContext(ctx, "go", append([]string{"test", "-json", "-vet=off"}, args...)...)
	cmd.Dir = folder
	cmd.Env = append(os.Environ(), "TMPDIR="+temporaryFolder())
	cmd.Cancel = func() error { return nil } // the interrupt reaches go test too, in the same process group
	cmd.Stderr = os.Stderr
	events, err := cmd.StdoutPipe()
	if err != nil {
		return false, err
	}
	if err := cmd.Start(); err != nil {
		return false, err
	}
	readErr := newReport(out, total).read(events, quietMax)
	err = cmd.Wait()
	if failed := (*exec.ExitError)(nil); errors.As(err, &failed) {
		return false, readErr
	}
	return err == nil, errors.Join(err, readErr)
}

// countPackages returns the number of packages with tests in the arguments, in the module of the folder.
func countPackages(ctx context.Context, folder string, args []string) (int, error) {
	list := []string{"list", "-f", "{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}"}
	for _, arg := range args {
		if strings.HasPrefix(arg, "./") { // a lone dot is the value of -bench
			list = append(list, arg)
		}
	}
	cmd := exec.CommandContext(ctx, "go", list...)
	cmd.Dir = folder
	cmd.Stderr = os.Stderr
	packages, err := cmd.Output()
	if err != nil {
		return 0, fmt.Errorf("go list: %w", err)
	}
	return len(strings.Fields(string(packages))), nil
}
