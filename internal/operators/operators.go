// Package operators has the operators of Stampede and their rights: it reads the file of operators, and finds the
// operator of a token. The file has only hashes of tokens.
package operators

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"stampede/internal/telemetry"
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

// Action is what an operator does, through the HTTP API or at the dashboard.
type Action string

// The actions.
const (
	Look           Action = "look"           // at orders, payments and histories, and at the pages of the dashboard
	ReportPayment  Action = "report-payment" // the shop's server
	SettlePayment  Action = "settle-payment" // note a refund, or dismiss
	ChangeSale     Action = "change-sale"    // pause, resume, restock, rename
	CancelOrder    Action = "cancel-order"
	SteerTarget    Action = "steer-target" // pause, resume, replay
	ResolveLetters Action = "resolve-letters"
	RunAudit       Action = "run-audit" // and apply its remedies
	NoteTrouble    Action = "note-trouble"
	CreateSale     Action = "create-sale"
	EndSale        Action = "end-sale"
	DrawSale       Action = "draw-sale" // create a draw, or open the sale after it
)

// lowest is the lowest role that may take each action, by whichever way.
var lowest = map[Action]Role{
	Look:           Viewer,
	ReportPayment:  Cashier,
	SettlePayment:  Cashier,
	ChangeSale:     Operator,
	CancelOrder:    Operator,
	SteerTarget:    Operator,
	ResolveLetters: Operator,
	RunAudit:       Operator,
	NoteTrouble:    Operator,
	CreateSale:     Admin,
	EndSale:        Admin,
	DrawSale:       Admin,
}

// Lowest returns the lowest role that may take the action. It panics if there is no such action: the zero role is
// everybody's.
func (a Action) Lowest() Role {
	role, known := lowest[a]
	if !known {
		panic(fmt.Sprintf("operators have no action %q", a))
	}
	return role
}

// May reports whether the operator may take the action.
func (p Person) May(a Action) bool { return p.Role >= a.Lowest() }

// ErrFile is returned for a file of operators that cannot be read or has faulty lines.
var ErrFile = errors.New("the file of operators cannot be used")

const (
	// readInterval is the pause between two reads of the file. Both must find a change: it is in force within ten seconds.
	readInterval = 4 * time.Second
	// remindInterval is the pause between two log lines about a file that still cannot be used.
	remindInterval = time.Minute
)

// Config says who the operators are. Both may be given, or none.
type Config struct {
	// File is the path of the file of operators.
	File string
	// AdminToken is the token of the operator adminName, who has the role Admin.
	AdminToken string
	Logger     *slog.Logger
	// Registerer registers the metric; nil for none.
	Registerer prometheus.Registerer
}

// Registry has the operators who are in force. It is safe for concurrent use.
type Registry struct {
	config Config
	admin  list
	inFile atomic.Pointer[list]
	// current is whether the operators in force are those of the file as it is.
	current prometheus.Gauge

	// Of the goroutine that reads the file: the text in force, the last one read, and when a fault was logged last.
	text     []byte
	seen     []byte
	faulty   error
	remindAt time.Time
}

// New returns a registry of the operators in the file, which must be valid. Run keeps it up to date.
func New(config Config) (*Registry, error) {
	current, err := telemetry.RegisterOnce(config.Registerer, prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "stampede_operators_file_current",
		Help: "1 if the operators in force are those of the file as it is, or there is no file; 0 if the file cannot be used.",
	}))
	if err != nil {
		return nil, fmt.Errorf("operators: %w", err)
	}
	r := &Registry{config: config, current: current}
	if config.AdminToken != "" {
		r.admin = list{{Person{adminName, Admin}, sha256.Sum256([]byte(config.AdminToken))}}
	}
	r.inFile.Store(new(list))
	r.current.Set(1)
	if config.File == "" {
		return r, nil
	}
	text, err := r.read()
	if err != nil {
		return nil, err
	}
	operators, err := r.parse(text)
	if err != nil {
		return nil, err
	}
	r.text, r.seen = text, text
	r.inFile.Store(&operators)
	return r, nil
}

// Configured is false if nobody can be an operator.
func (r *Registry) Configured() bool { return r.admin != nil || r.config.File != "" }

// Find returns the operator to whom a token belongs.
func (r *Registry) Find(token string) (Person, bool) { return r.FindHash(sha256.Sum256([]byte(token))) }

// FindHash is Find for a token of which only the SHA-256 was kept, as that of a session.
func (r *Registry) FindHash(hash [sha256.Size]byte) (Person, bool) {
	inFile, known := r.inFile.Load().find(hash)
	if admin, isAdmin := r.admin.find(hash); isAdmin {
		return admin, true
	}
	return inFile, known
}

// Run reads the file repeatedly until ctx is done. A version counts when two reads in a row find it, because a write
// may be in progress. A version with a fault is logged as an error, and again every minute; meanwhile no operator gains
// a right, and operators that it lacks lose theirs. While the file cannot be read or is incomplete, nothing changes.
func (r *Registry) Run(ctx context.Context) {
	if r.config.File == "" {
		return
	}
	tick := time.NewTicker(readInterval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			r.reread(ctx)
		case <-ctx.Done():
			return
		}
	}
}

func (r *Registry) reread(ctx context.Context) {
	text, err := r.read()
	if err == nil && !bytes.Equal(text, r.seen) {
		r.seen = text
		return
	}
	if err == nil && bytes.Equal(text, r.text) && r.faulty == nil {
		return
	}
	before := *r.inFile.Load()
	operators := before
	fault := "the file of operators cannot be read, or was not written to its end: nothing changes"
	if err == nil {
		err = r.cut(text)
	}
	if err == nil {
		if operators, err = r.parse(text); err != nil {
			operators = before.restricted(text)
			fault = "the file of operators has a fault: nobody gets a right from it, and who is missing in it has lost theirs"
		}
	}
	isNews := err == nil || r.faulty == nil || err.Error() != r.faulty.Error()
	r.text, r.faulty = text, err
	changes := changedRights(before, operators)
	r.inFile.Store(&operators)
	if err == nil {
		r.current.Set(1)
		r.config.Logger.InfoContext(ctx, "the file of operators was read", "file", r.config.File, "changes", changes)
		return
	}
	r.current.Set(0)
	if isNews || len(changes) > 0 || time.Now().After(r.remindAt) {
		r.remindAt = time.Now().Add(remindInterval)
		r.config.Logger.ErrorContext(ctx, fault, "file", r.config.File, "error", err, "changes", changes)
	}
}

// cut returns an error for what a write leaves that did not come to its end, as on a full disk: no line, or a part of
// the last one.
func (r *Registry) cut(text []byte) error {
	last := string(text[bytes.LastIndexByte(text, '\n')+1:])
	_, err := parseLine(last)
	switch {
	case len(bytes.TrimSpace(text)) == 0:
		err = errors.New("it is empty; a line that begins with # says that nobody is in it")
	case isComment(last) || err == nil:
		return nil
	default:
		err = fmt.Errorf("its last line has no end: %w", err)
	}
	return fmt.Errorf("%w: %s: %w", ErrFile, r.config.File, err)
}

// changedRights names the operators whose rights differ.
func changedRights(before, after list) []string {
	changes := []string{}
	for _, e := range before {
		if i := slices.IndexFunc(after, func(o entry) bool { return o.hash == e.hash }); i < 0 {
			changes = append(changes, e.Name+" revoked")
		} else if after[i].Person != e.Person {
			changes = append(changes, fmt.Sprintf("%s is now %s (%s)", e.Name, after[i].Name, after[i].Role))
		}
	}
	for _, e := range after {
		if !slices.ContainsFunc(before, func(o entry) bool { return o.hash == e.hash }) {
			changes = append(changes, fmt.Sprintf("%s added (%s)", e.Name, e.Role))
		}
	}
	return changes
}

// read returns the text of the file, at most one byte more than it may have. It refuses a file
// that others may write, and warns of one that they may read: it has hashes of tokens.
func (r *Registry) read() (text []byte, err error) {
	file, err := os.Open(r.config.File)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrFile, err)
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	info, err := file.Stat()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrFile, err)
	}
	switch mode := info.Mode().Perm(); {
	case mode&0o002 != 0 && runtime.GOOS != "windows": // which has no such modes
		return nil, fmt.Errorf("%w: %s has the mode %04o, so every user of this machine may add operators: chmod o-w",
			ErrFile, r.config.File, mode)
	case mode&0o004 != 0 && r.text == nil:
		r.config.Logger.Warn("every user of this machine may read the file of operators: chmod o-r",
			"file", r.config.File, "mode", fmt.Sprintf("%04o", mode))
	}
	text, err = io.ReadAll(io.LimitReader(file, maxBytes+1))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrFile, err)
	}
	return text, nil
}

// parse reads the operators in a text, who must not be mistaken for the one with the admin token.
func (r *Registry) parse(text []byte) (list, error) {
	operators, err := parse(text)
	for _, e := range operators {
		for _, admin := range r.admin {
			if e.Name == admin.Name || e.hash == admin.hash {
				err = errors.Join(err, fmt.Errorf("%s has the name or the token of STAMPEDE_ADMIN_TOKEN", e.Name))
			}
		}
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrFile, r.config.File, err)
	}
	return operators, nil
}
