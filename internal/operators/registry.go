package operators

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"stampede/internal/telemetry"
)

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
