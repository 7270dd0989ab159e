// Command mutants holds the tests to what they are for. Each mutant in the files beside this one, one for each room,
// removes one defence and names the cheapest test that must then fail. The arguments are parts of the names of mutants;
// without any, all are tried.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// mutant is a patch and the test that must fail with it.
type mutant struct{ name, patch, pkg, test, tags string }

// heading precedes the diff of each mutant. The test may have a subtest: TestX/name.
var heading = regexp.MustCompile(`(?m)^Mutant: (\S+)\nDefence: \S.*\nCaught by: (\./\S+) ((Test\w+)\S*)\ndiff `)

// load returns the mutants of the tree at root whose names contain one of the parts, or all.
func load(root string, parts []string) (found []mutant, err error) {
	files, err := filepath.Glob(filepath.Join(root, "internal/test/mutants/*.patch"))
	names := map[string]bool{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		heads := heading.FindAllSubmatchIndex(text, -1)
		if defences := bytes.Count(text, []byte("Defence: ")); len(heads) == 0 || len(heads) != defences || heads[0][0] != 0 {
			return nil, fmt.Errorf("%s: three lines before each diff must name the mutant, the defence and its test", file)
		}
		for i, head := range heads {
			group := func(n int) string { return string(text[head[2*n]:head[2*n+1]]) }
			end := len(text)
			if i+1 < len(heads) {
				end = heads[i+1][0]
			}
			m := mutant{name: group(1), patch: string(text[head[0]:end]), pkg: group(2), test: group(3)}
			if names[m.name] {
				return nil, fmt.Errorf("two mutants are called %s", m.name)
			}
			names[m.name] = true
			if len(parts) > 0 && !slices.ContainsFunc(parts, func(p string) bool { return strings.Contains(m.name, p) }) {
				continue
			}
			if m.tags, err = declaredTag(filepath.Join(root, m.pkg), group(4)); err != nil {
				return nil, fmt.Errorf("%s: %w", m.name, err)
			}
			found = append(found, m)
		}
	}
	return found, err
}

var buildTag = regexp.MustCompile(`^//go:build (\w+)\n`)

// declaredTag returns the build tag of the file that declares a test.
func declaredTag(pkg, test string) (string, error) {
	files, err := filepath.Glob(filepath.Join(pkg, "*_test.go"))
	for _, file := range files {
		source, err := os.ReadFile(file)
		if err != nil {
			return "", err
		}
		if !bytes.Contains(source, []byte("\nfunc "+test+"(t ")) {
			continue
		}
		if found := buildTag.FindSubmatch(source); found != nil {
			return string(found[1]), nil
		}
		return "", nil
	}
	return "", errors.Join(err, fmt.Errorf("%s has no %s", pkg, test))
}

// run runs a command in a folder. The error holds its output.
func run(folder, name string, args ...string) (output string, err error) {
	return runWith("", folder, name, args...)
}

// runWith is run with an input.
func runWith(input, folder, name string, args ...string) (output string, err error) {
	cmd := exec.Command(name, args...)
	cmd.Dir, cmd.Stdin = folder, strings.NewReader(input)
	both, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, both)
	}
	return string(both), err
}

var hasFailed = regexp.MustCompile("(?m)^(--- FAIL|panic): ")

// pass compiles a package in the work tree and reports whether its tests, those of the mutants, pass.
func pass(tree string, mutants ...mutant) (bool, error) {
	pkg, tags, binary := mutants[0].pkg, mutants[0].tags, filepath.Join(tree, "mutant.test")
	var tests []string
	for _, m := range mutants {
		tests = append(tests, "^"+strings.ReplaceAll(m.test, "/", "$/^")+"$")
	}
	// -trimpath shares the build cache with other work trees. Nobody debugs the binary.
	build := []string{"test", "-c", "-trimpath", "-vet=off", "-ldflags=-s -w", "-tags", tags, "-o", binary, pkg}
	if _, err := run(tree, "go", build...); err != nil {
		return false, err
	}
	test := []string{"-test.v", "-test.timeout=5m", "-test.run", strings.Join(tests, "|")}
	output, err := run(filepath.Join(tree, pkg), binary, test...)
	switch {
	case err == nil && !strings.Contains(output, "--- PASS: "):
		return false, fmt.Errorf("%s has none of %s", pkg, tests)
	case hasFailed.MatchString(output):
		return false, nil
	}
	return err == nil, err
}

// catch applies a mutant in the work tree, and returns nil if its test fails.
func catch(tree string, m mutant) error {
	if _, err := runWith(m.patch, tree, "git", "apply", "-"); err != nil {
		return err
	}
	passed, err := pass(tree, m)
	if passed {
		err = errors.New("SURVIVED")
	}
	_, resetErr := run(tree, "git", "checkout", "--quiet", ".")
	return errors.Join(err, resetErr)
}

// try tries the mutants in a work tree of HEAD. Without them their tests must pass: all those of a package at once.
func try(parts []string) error {
	root, err := os.Getwd()
	if err != nil {
		return err
	}
	mutants, err := load(root, parts)
	if err != nil {
		return err
	}
	tree, err := os.MkdirTemp("", "mutants")
	if err != nil {
		return err
	}
	interrupted := make(chan os.Signal, 1)
	signal.Notify(interrupted, os.Interrupt) // which ends the commands, too
	defer func() { _, _ = run(root, "git", "worktree", "remove", "--force", tree) }()
	if _, err := run(root, "git", "worktree", "add", "--detach", tree, "HEAD"); err != nil {
		return err
	}
	byPackage := map[string][]mutant{}
	for _, m := range mutants {
		byPackage[m.pkg+" "+m.tags] = append(byPackage[m.pkg+" "+m.tags], m)
	}
	for pkg, group := range byPackage {
		if passed, err := pass(tree, group...); !passed {
			return errors.Join(fmt.Errorf("without a mutant, tests of %s fail", pkg), err)
		}
	}
	missed := 0
	for _, m := range mutants {
		began, verdict := time.Now(), "caught"
		err := catch(tree, m)
		if len(interrupted) > 0 {
			return errors.New("interrupted")
		}
		if err != nil {
			verdict = err.Error()
			missed++
		}
		fmt.Printf("%-36s %6.1f s  %s %s: %s\n", m.name, time.Since(began).Seconds(), m.pkg, m.test, verdict)
	}
	if missed > 0 {
		return fmt.Errorf("%d of %d mutants were not caught", missed, len(mutants))
	}
	fmt.Printf("all %d mutants were caught\n", len(mutants))
	return nil
}

func main() {
	if err := try(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}
