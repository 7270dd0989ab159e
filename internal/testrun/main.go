// Command testrun runs go test and tells where it is: a line for each package that ends, and the log of each
// test that fails, of that test alone. Its arguments are those of go test; with -C FOLDER in front, the module of
// that folder is tested.
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

// stillRunning is how long there is no news before it says what runs.
const stillRunning = 30 * time.Second

// run runs go test with the arguments and reports on out. It returns whether all tests passed.
func run(ctx context.Context, args []string, out io.Writer) (passed bool, err error) {
	var folder string
	if len(args) > 1 && args[0] == "-C" {
		folder, args = args[1], args[2:]
	}
	total, err := countPackages(ctx, folder, args)
	if err != nil {
		return false, err
	}
	cmd := exec.CommandContext(ctx, "go", append([]string{"test", "-json"}, args...)...)
	cmd.Dir = folder
	cmd.Cancel = func() error { return nil } // the interrupt reaches its process group as well, and it ends by itself
	cmd.Stderr = os.Stderr
	events, err := cmd.StdoutPipe()
	if err != nil {
		return false, err
	}
	if err := cmd.Start(); err != nil {
		return false, err
	}
	readErr := newReport(out, total).read(events, stillRunning)
	err = cmd.Wait()
	if failed := (*exec.ExitError)(nil); errors.As(err, &failed) {
		return false, readErr
	}
	return err == nil, errors.Join(err, readErr)
}

// countPackages returns how many packages with tests the arguments name, in the module of the folder.
func countPackages(ctx context.Context, folder string, args []string) (int, error) {
	list := []string{"list", "-f", "{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}"}
	for _, arg := range args {
		if strings.HasPrefix(arg, "./") { // a lone dot is the pattern of -bench .
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
