// Command mutants holds the tests to what they are for. Each patch beside this file removes one defence and names the
// cheapest test that must then fail. The arguments are parts of the names of patches; without any, all are tried.
package main

import (
	"context"
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

const folder = "internal/test/mutants"

// mutant is a patch and the test that must fail with it.
type mutant struct{ name, file, pkg, test, tags string }

// heading precedes the diff of each patch. The test may have a subtest: TestX/name.
var heading = regexp.MustCompile(`^Defence: \S.*\nCaught by: (\./\S+) ((Test\w+)\S*)\ndiff `)

// load returns the mutants of the tree at root whose names contain one of the parts, or all.
func load(root string, parts []string) (found []mutant, err error) {
	files, err := filepath.Glob(filepath.Join(root, folder, "*.patch"))
	for _, file := range files {
		m := mutant{name: strings.TrimSuffix(filepath.Base(file), ".patch"), file: file}
		if len(parts) > 0 && !slices.ContainsFunc(parts, func(p string) bool { return strings.Contains(m.name, p) }) {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		head := heading.FindSubmatch(text)
		if head == nil {
			return nil, fmt.Errorf("%s: two lines before the diff must name the defence and its test", m.name)
		}
		m.pkg, m.test = string(head[1]), string(head[2])
		if m.tags, err = tagsOf(filepath.Join(root, m.pkg), string(head[3])); err != nil {
			return nil, fmt.Errorf("%s: %w", m.name, err)
		}
		found = append(found, m)
	}
	return found, err
}

// tagsOf returns the build tag of the file that declares a test.
func tagsOf(pkg, test string) (string, error) {
	declares := regexp.MustCompile(`(?s)^(?://go:build (\w+)\n)?.*\nfunc ` + test + `\(t `)
	files, err := filepath.Glob(filepath.Join(pkg, "*_test.go"))
	for _, file := range files {
		source, err := os.ReadFile(file)
		if err != nil {
			return "", err
		}
		if found := declares.FindSubmatch(source); found != nil {
			return string(found[1]), nil
		}
	}
	return "", errors.Join(err, fmt.Errorf("%s has no %s", pkg, test))
}

// tree is a work tree.
type tree string

func (t tree) run(ctx context.Context, dir, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = filepath.Join(string(t), dir)
	output, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, output)
	}
	return string(output), err
}

// pass compiles the package of the mutants and reports whether their tests pass.
func (t tree) pass(ctx context.Context, mutants ...mutant) (bool, error) {
	binary := filepath.Join(string(t), "mutant.test")
	pkg, tags := mutants[0].pkg, mutants[0].tags
	var names []string
	for _, m := range mutants {
		names = append(names, "^"+strings.ReplaceAll(m.test, "/", "$/^")+"$")
	}
	tests := strings.Join(names, "|")
	// -trimpath shares the build cache with the tree of HEAD. Nobody debugs the binary.
	build := []string{"test", "-c", "-trimpath", "-vet=off", "-ldflags=-s -w", "-tags", tags, "-o", binary, pkg}
	if _, err := t.run(ctx, "", "go", build...); err != nil {
		return false, err
	}
	output, err := t.run(ctx, pkg, binary, "-test.v", "-test.timeout=5m", "-test.run", tests)
	switch exit := new(exec.ExitError); {
	case err == nil && !strings.Contains(output, "--- PASS: "):
		return false, fmt.Errorf("%s ran none of %s", pkg, tests)
	case errors.As(err, &exit) && ctx.Err() == nil && regexp.MustCompile("(?m)^(--- FAIL|panic): ").MatchString(output):
		return false, nil
	}
	return err == nil, err
}

// try applies a mutant and reports whether its test catches it.
func (t tree) try(ctx context.Context, m mutant) (caught bool, err error) {
	if _, err := t.run(ctx, "", "git", "apply", m.file); err != nil {
		return false, err
	}
	passed, err := t.pass(ctx, m)
	_, resetErr := t.run(ctx, "", "git", "checkout", "--quiet", ".")
	return !passed, errors.Join(err, resetErr)
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

// run tries the mutants in a work tree of HEAD. Without them their tests must pass, all those of a package at once.
func run(ctx context.Context, parts []string) error {
	root, err := filepath.Abs(".")
	if err != nil {
		return err
	}
	mutants, err := load(root, parts)
	if err != nil {
		return err
	}
	temporary, err := os.MkdirTemp("", "mutants")
	if err != nil {
		return err
	}
	t := tree(filepath.Join(temporary, "tree"))
	defer func() {
		_, _ = tree(root).run(context.Background(), "", "git", "worktree", "remove", "--force", string(t))
		_ = os.RemoveAll(temporary)
	}()
	if _, err := tree(root).run(ctx, "", "git", "worktree", "add", "--detach", string(t), "HEAD"); err != nil {
		return err
	}
	byPackage := map[string][]mutant{}
	for _, m := range mutants {
		key := m.pkg + " " + m.tags
		byPackage[key] = append(byPackage[key], m)
	}
	for key, all := range byPackage {
		if passed, err := t.pass(ctx, all...); !passed {
			return errors.Join(err, fmt.Errorf("without a mutant the tests of %s fail", key))
		}
	}
	missed := 0
	for _, m := range mutants {
		began, verdict := time.Now(), "caught"
		caught, err := t.try(ctx, m)
		if err != nil {
			verdict = err.Error()
		} else if !caught {
			verdict = "SURVIVED"
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if verdict != "caught" {
			missed++
		}
		fmt.Printf("%-42s %5.1f s  %s %s  %s\n", m.name, time.Since(began).Seconds(), m.pkg, m.test, verdict)
	}
	if missed > 0 {
		return fmt.Errorf("%d of %d mutants were not caught", missed, len(mutants))
	}
	fmt.Printf("all %d mutants were caught\n", len(mutants))
	return nil
}
