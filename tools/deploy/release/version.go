package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"time"
)

var isVersion = regexp.MustCompile(`^v[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.-]+)?$`)

// identify finds the version and the time of the commit. A release is a commit with a tag, as it was committed.
func (r *release) identify(ctx context.Context) error {
	changed, err := r.git(ctx, "status", "--porcelain")
	if err != nil {
		return err
	}
	if err := r.findTime(ctx); err != nil {
		return err
	}
	if r.isSnapshot {
		r.version, err = r.git(ctx, "describe", "--tags", "--always", "--abbrev=12", "--dirty")
		return err
	}
	if changed != "" {
		return fmt.Errorf("these files are not committed (-snapshot builds them):\n%s", changed)
	}
	tags, err := r.git(ctx, "tag", "--points-at", "HEAD")
	if err != nil {
		return err
	}
	var versions []string
	for _, tag := range strings.Fields(tags) {
		if isVersion.MatchString(tag) {
			versions = append(versions, tag)
		}
	}
	switch len(versions) {
	case 0:
		return errors.New("HEAD has no tag such as v1.2.3 (-snapshot builds it all the same)")
	case 1:
		r.version = versions[0]
		return nil
	}
	return fmt.Errorf("HEAD has several versions: %s", strings.Join(versions, ", "))
}

// findTime takes SOURCE_DATE_EPOCH, or else the time of the commit.
func (r *release) findTime(ctx context.Context) error {
	text := os.Getenv("SOURCE_DATE_EPOCH")
	if text == "" {
		var err error
		if text, err = r.git(ctx, "log", "-1", "--format=%ct"); err != nil {
			return err
		}
	}
	seconds, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return fmt.Errorf("SOURCE_DATE_EPOCH: %w", err)
	}
	r.at = time.Unix(seconds, 0).UTC()
	return nil
}

// section is the heading of the changelog that has the notes.
func (r *release) section() string {
	if r.isSnapshot {
		return "Unreleased"
	}
	return r.version
}

func (r *release) git(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "git", args...)
	cmd.Dir = r.root
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			return "", fmt.Errorf("git %s: %s", args[0], strings.TrimSpace(string(exit.Stderr)))
		}
		return "", fmt.Errorf("git %s: %w", args[0], err)
	}
	return strings.TrimSpace(string(out)), nil
}

// readNotes returns a section of the changelog: "Unreleased", or the one of a version, whose heading may have its date,
// as in "## 1.2.3 - 2026-11-23".
func readNotes(changelog, section string) ([]byte, error) {
	text, err := os.ReadFile(changelog)
	if err != nil {
		return nil, err
	}
	heading := regexp.MustCompile(`(?m)^## \[?v?` + regexp.QuoteMeta(strings.TrimPrefix(section, "v")) + `\]?( .*)?$`)
	at := heading.FindIndex(text)
	if at == nil {
		return nil, fmt.Errorf("CHANGELOG.md has no section %q", section)
	}
	notes, _, _ := strings.Cut(string(text[at[1]:]), "\n## ")
	if notes = strings.TrimSpace(notes); notes == "" {
		return nil, fmt.Errorf("the section %q of CHANGELOG.md is empty", section)
	}
	return []byte(notes + "\n"), nil
}
