package main

import (
	"os"
	"os/user"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// operatorFlag is for commands whose change is recorded with who made it.
type operatorFlag struct {
	Operator string `env:"STAMPEDE_OPERATOR" placeholder:"NAME" help:"Who makes the change, recorded with it (default: cli: and the user of the system)."`
}

const maxOperatorBytes = 200

// name returns the operator, or a usage error for a name that a log could not show.
func (f operatorFlag) name() (string, error) {
	valid := len(f.Operator) <= maxOperatorBytes && utf8.ValidString(f.Operator) &&
		!strings.ContainsFunc(f.Operator, unicode.IsControl)
	err := checkFlag(valid, "--operator", strconv.Quote(f.Operator), "at most 200 bytes without control characters")
	if err != nil {
		return "", err
	}
	if name := strings.TrimSpace(f.Operator); name != "" {
		return name, nil
	}
	// A container may run as a user without a name.
	if u, err := user.Current(); err == nil && u.Username != "" {
		return "cli:" + u.Username, nil
	}
	return "cli:" + strconv.Itoa(os.Getuid()), nil
}
