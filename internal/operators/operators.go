// Package operators has the operators of Stampede and their rights: it reads the file of operators, and finds the
// operator of a token. The file has only hashes of tokens.
package operators

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Role is what an operator may do: everything that a lower role may, and more.
type Role int

// The roles, from the lowest. None may do nothing; lowest has what the others may.
const (
	None Role = iota
	Viewer
	Cashier // the role of the shop's server
	Operator
	Admin
)

var roleNames = []string{"none", "viewer", "cashier", "operator", "admin"}

func (r Role) String() string { return roleNames[r] }

// adminName is the name of the operator with the single admin token.
const adminName = "admin"

const (
	// maxBytes and maxOperators bound a file: every call compares its token with each operator.
	maxBytes     = 64 << 10
	maxOperators = 256
	maxNameBytes = 64
)

// Person is an operator.
type Person struct {
	Name string
	Role Role
}

// entry is a line of the file.
type entry struct {
	Person
	hash [sha256.Size]byte // of the token
}

// list are the operators of one version of the file.
type list []entry

// find returns the operator whose token has a hash. It takes the same time for each token, known or not: it compares
// hashes, which have one length, with those of all operators.
func (l list) find(hash [sha256.Size]byte) (found Person, ok bool) {
	at := -1
	for i := range l {
		at = subtle.ConstantTimeSelect(subtle.ConstantTimeCompare(hash[:], l[i].hash[:]), i, at)
	}
	if at < 0 {
		return Person{}, false
	}
	return l[at].Person, true
}

// parse reads a file: one operator a line, as name, role and the SHA-256 of the token in hex. Empty lines, and lines
// that begin with #, are left out. The error names all faulty lines; the list then has the others.
func parse(text []byte) (list, error) {
	if len(text) > maxBytes {
		return nil, fmt.Errorf("the file has more than %d bytes", maxBytes)
	}
	var operators list
	var errs []error
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, maxBytes+1)
	for number := 1; lines.Scan(); number++ {
		if isComment(lines.Text()) {
			continue
		}
		e, err := parseLine(lines.Text())
		if err == nil {
			err = operators.mayAdd(e)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("line %d: %w", number, err))
			continue
		}
		operators = append(operators, e)
	}
	return operators, errors.Join(append(errs, lines.Err())...)
}

func isComment(line string) bool {
	line = strings.TrimSpace(line)
	return line == "" || strings.HasPrefix(line, "#")
}

func parseLine(line string) (e entry, err error) {
	fields := strings.Fields(line)
	if len(fields) != 3 {
		return entry{}, fmt.Errorf("%d fields, want 3: name, role, and the SHA-256 of the token in hex", len(fields))
	}
	if !isName(fields[0]) {
		return entry{}, fmt.Errorf("the name must be 1 to %d letters, digits, or . _ - @", maxNameBytes)
	}
	role := slices.Index(roleNames, fields[1])
	if Role(role) < Viewer {
		return entry{}, fmt.Errorf("the role of %s must be viewer, cashier, operator or admin", fields[0])
	}
	// The text of a wrong hash is not repeated: it may be the token.
	hash, err := hex.DecodeString(fields[2])
	if err != nil || len(hash) != len(e.hash) {
		return entry{}, fmt.Errorf("the hash of %s must be the SHA-256 of the token: 64 hexadecimal digits", fields[0])
	}
	e.hash = [sha256.Size]byte(hash)
	if e.hash == sha256.Sum256(nil) {
		return entry{}, fmt.Errorf("the hash of %s is that of an empty token", fields[0])
	}
	e.Person = Person{fields[0], Role(role)}
	return e, nil
}

func isName(name string) bool {
	for _, c := range []byte(name) {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', strings.IndexByte("._-@", c) >= 0:
		default:
			return false
		}
	}
	return len(name) <= maxNameBytes
}

// mayAdd refuses a second operator with a name or a token.
func (l list) mayAdd(e entry) error {
	for _, other := range l {
		switch {
		case other.Name == e.Name:
			return fmt.Errorf("the name %s is given twice", e.Name)
		case other.hash == e.hash:
			return fmt.Errorf("%s has the token of %s", e.Name, other.Name)
		}
	}
	if len(l) == maxOperators {
		return fmt.Errorf("more than %d operators", maxOperators)
	}
	return nil
}

// restricted returns what a faulty version of the file leaves of the operators: those whose hash it still has, each
// with the lower of both roles. So a revocation is in force at once, whatever is wrong with another line, and nobody
// gets a right from a file that was not understood. An operator whose own line is faulty stays.
func (l list) restricted(faulty []byte) list {
	var left list
	for _, e := range l {
		role := None
		for line := range strings.Lines(string(faulty)) {
			if isComment(line) || !strings.Contains(strings.ToLower(line), hex.EncodeToString(e.hash[:])) {
				continue
			}
			if read, err := parseLine(line); err == nil {
				role = max(role, min(e.Role, read.Role))
			} else {
				role = e.Role
			}
		}
		if e.Role = role; role > None {
			left = append(left, e)
		}
	}
	return left
}
