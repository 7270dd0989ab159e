package operators

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func hashOf(token string) string {
	hash := sha256.Sum256([]byte(token))
	return hex.EncodeToString(hash[:])
}

// line is a line of the file; the token is the name.
func line(name, role string) string { return name + " " + role + " " + hashOf(name) + "\n" }

func TestFileOfOperators(t *testing.T) {
	t.Parallel()
	text := "# the team\n\n" + line("ann", "viewer") + "\t" + line("b.o_b-1@x", "operator") +
		"  # commented out: " + line("eve", "admin") + "cid  admin\t" + strings.ToUpper(hashOf("cid")) + " \r\n"
	operators, err := parse([]byte(text))
	require.NoError(t, err)
	for token, want := range map[string]Person{
		"ann": {"ann", Viewer}, "b.o_b-1@x": {"b.o_b-1@x", Operator}, "cid": {"cid", Admin},
	} {
		found, ok := operators.find(sha256.Sum256([]byte(token)))
		require.True(t, ok, token)
		require.Equal(t, want, found)
	}
	for _, token := range []string{"", "eve", "Ann", hashOf("ann"), "ann "} {
		_, ok := operators.find(sha256.Sum256([]byte(token)))
		require.False(t, ok, token)
	}
	none, err := parse(nil)
	require.NoError(t, err)
	require.Empty(t, none)
}

func TestFaultyLinesAreNamed(t *testing.T) {
	t.Parallel()
	many := ""
	for i := range maxOperators + 1 {
		many += line(fmt.Sprint("o", i), "viewer")
	}
	for text, want := range map[string]string{
		"ann\n":                                              "line 1: 1 fields, want 3",
		"# x\nann admin\n":                                   "line 2: 2 fields",
		line("ann", "admin") + "x y z w\n":                   "line 2: 4 fields",
		line("ann", "root"):                                  "line 1: the role of ann",
		line("ann", "none"):                                  "line 1: the role of ann",
		line("ann", "Admin"):                                 "line 1: the role of ann",
		line("a:b", "admin"):                                 "line 1: the name must be",
		line(strings.Repeat("n", 65), "admin"):               "line 1: the name must be",
		line("zoë", "admin"):                                 "line 1: the name must be",
		"ann admin secret-token\n":                           "line 1: the hash of ann must be the SHA-256",
		"ann admin " + hashOf("a")[1:] + "\n":                "line 1: the hash of ann",
		"ann admin " + hashOf("a") + "0\n":                   "line 1: the hash of ann",
		"ann admin " + hashOf("") + "\n":                     "line 1: the hash of ann is that of an empty token",
		line("ann", "admin") + line("ann", "viewer"):         "line 2: the name ann is given twice",
		line("ann", "admin") + "bob viewer " + hashOf("ann"): "line 2: bob has the token of ann",
		"x\n" + line("ann", "admin") + "y\n":                 "line 3: 1 fields",
		many:                                                 "line 257: more than 256 operators",
		"#" + strings.Repeat("x", maxBytes):                  "more than 65536 bytes",
		line("ann", "admin") + "\x00\xff a b\n":              "line 2: the name must be",
	} {
		_, err := parse([]byte(text))
		require.ErrorContains(t, err, want)
		require.NotContains(t, err.Error(), "secret-token", "it may be a token")
	}
}

// A role may what the lower ones may, and an action that does not exist is nobody's.
func TestRolesMayTakeActions(t *testing.T) {
	t.Parallel()
	for action, want := range map[Action]Role{Look: Viewer, SettlePayment: Cashier, ChangeSale: Operator, EndSale: Admin} {
		for role := None; role <= Admin; role++ {
			require.Equal(t, role >= want, Person{"ann", role}.May(action), "%s %s", role, action)
		}
	}
	require.Panics(t, func() { Person{"ann", Admin}.May("end-sales") })
}

// written is a file of operators and its registry.
type written struct {
	*Registry
	t    *testing.T
	file string
	log  *bytes.Buffer
}

func open(t *testing.T, text string) *written {
	t.Helper()
	w := &written{t: t, file: filepath.Join(t.TempDir(), "operators"), log: &bytes.Buffer{}}
	require.NoError(t, os.WriteFile(w.file, []byte(text), 0o600))
	var err error
	w.Registry, err = New(Config{
		File: w.file, AdminToken: "the-token", Logger: slog.New(slog.NewTextHandler(w.log, nil)),
		Registerer: prometheus.NewRegistry(),
	})
	require.NoError(t, err)
	return w
}

// change writes another version of the file and has it read, as often as it has to be found.
func (w *written) change(text string) {
	w.t.Helper()
	require.NoError(w.t, os.WriteFile(w.file, []byte(text), 0o600))
	w.log.Reset()
	w.reread(context.Background())
	require.Empty(w.t, w.log.String(), "it may be in the middle of a write")
	w.reread(context.Background())
}

// has checks the roles of operators, by their tokens; None for somebody who is none.
func (w *written) has(want map[string]Role) {
	w.t.Helper()
	for token, role := range want {
		found, _ := w.Find(token)
		require.Equal(w.t, role, found.Role, token)
	}
	require.True(w.t, w.Configured())
	admin, ok := w.Find("the-token")
	require.True(w.t, ok)
	require.Equal(w.t, Person{adminName, Admin}, admin)
}

func TestChangesOfFileAreInForce(t *testing.T) {
	t.Parallel()
	w := open(t, line("ann", "viewer")+line("bob", "operator"))
	w.has(map[string]Role{"ann": Viewer, "bob": Operator, "cid": None})
	w.change(line("ann", "admin") + line("cid", "viewer"))
	w.has(map[string]Role{"ann": Admin, "bob": None, "cid": Viewer})
	require.Contains(t, w.log.String(), "ann is now ann (admin)")
	require.Contains(t, w.log.String(), "bob revoked")
	require.Contains(t, w.log.String(), "cid added (viewer)")
	w.log.Reset()
	w.reread(t.Context())
	require.Empty(t, w.log.String(), "nothing has changed")
	w.change("# nobody")
	w.has(map[string]Role{"ann": None, "cid": None})
	require.EqualValues(t, 1, testutil.ToFloat64(w.current))
}

// A file that is being written, or that was not written to its end, revokes nobody.
func TestFileInTheMiddleOfAWrite(t *testing.T) {
	t.Parallel()
	before := line("ann", "admin") + line("bob", "operator")
	w := open(t, before)
	want := map[string]Role{"ann": Admin, "bob": Operator, "cid": None}
	after := "# the team\n" + line("ann", "viewer") + line("cid", "viewer")
	for end := range after { // each read finds another part
		require.NoError(t, os.WriteFile(w.file, []byte(after[:end]), 0o600))
		w.reread(t.Context())
		w.has(want)
	}
	require.Empty(t, w.log.String())
	for _, left := range []string{"", line("ann", "admin") + "bob oper", " \n\n", line("cid", "admin")[:40]} {
		w.change(left)
		w.has(want)
		require.Contains(t, w.log.String(), "level=ERROR")
		require.Contains(t, w.log.String(), "nothing changes")
		require.Zero(t, testutil.ToFloat64(w.current))
	}
	w.change(after)
	w.has(map[string]Role{"ann": Viewer, "bob": None, "cid": Viewer})
	require.EqualValues(t, 1, testutil.ToFloat64(w.current))
}

// A fault in one line must not keep anybody who was revoked, and gives nobody a right.
func TestFaultyVersionOnlyTakesRights(t *testing.T) {
	t.Parallel()
	before := line("ann", "operator") + line("bob", "operator") + line("cid", "viewer") + line("dan", "admin") +
		line("eve", "viewer") + line("fay", "admin")
	w := open(t, before)
	faulty := line("ann", "admin") + "# " + line("bob", "operator") + line("cid", "viewr") + line("dan", "viewer") +
		line("new", "admin") + "fay admin " + strings.ToUpper(hashOf("fay")) + " again\n"
	w.change(faulty)
	want := map[string]Role{
		"ann": Operator, // the higher role waits
		"bob": None,     // commented out
		"cid": Viewer,   // the fault is in this line
		"dan": Viewer,   // the lower role does not wait
		"eve": None,     // deleted
		"fay": Admin,
		"new": None,
	}
	w.has(want)
	require.Contains(t, w.log.String(), "level=ERROR")
	require.Contains(t, w.log.String(), "line 3: the role of cid")
	require.Contains(t, w.log.String(), "eve revoked")
	require.Zero(t, testutil.ToFloat64(w.current))
	w.log.Reset()
	w.reread(t.Context())
	require.Empty(t, w.log.String(), "it was logged a moment ago")
	w.remindAt = w.remindAt.Add(-remindInterval)
	w.reread(t.Context())
	require.Contains(t, w.log.String(), "line 3", "a reminder")
	w.has(want)

	// Without the file nothing changes, and the log says so.
	require.NoError(t, os.Remove(w.file))
	w.log.Reset()
	w.reread(t.Context())
	w.has(want)
	require.Contains(t, w.log.String(), "no such file")
	w.change(before)
	w.has(map[string]Role{"ann": Operator, "bob": Operator, "dan": Admin, "eve": Viewer})
	require.EqualValues(t, 1, testutil.ToFloat64(w.current))
}

func TestFaultyFileIsRefusedAtStart(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"ann\n":                             "line 1",
		line("admin", "viewer"):             "STAMPEDE_ADMIN_TOKEN",
		"ann viewer " + hashOf("the-token"): "STAMPEDE_ADMIN_TOKEN",
	} {
		file := filepath.Join(t.TempDir(), "operators")
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		_, err := New(Config{File: file, AdminToken: "the-token", Logger: slog.Default()})
		require.ErrorIs(t, err, ErrFile)
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, file)
	}
	_, err := New(Config{File: t.TempDir() + "/none", Logger: slog.Default()})
	require.ErrorIs(t, err, ErrFile)
	none, err := New(Config{Logger: slog.Default()})
	require.NoError(t, err)
	require.False(t, none.Configured())
	_, ok := none.Find("")
	require.False(t, ok)
	none.Run(t.Context()) // there is nothing to read
}

func TestFileOfOtherRightsIsNamed(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "operators")
	require.NoError(t, os.WriteFile(file, []byte(line("ann", "viewer")), 0o600))
	for mode, warned := range map[os.FileMode]bool{0o600: false, 0o640: false, 0o440: false, 0o644: true} {
		require.NoError(t, os.Chmod(file, mode))
		var log bytes.Buffer
		_, err := New(Config{File: file, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		require.NoError(t, err)
		require.Equal(t, warned, strings.Contains(log.String(), "chmod o-r"), "%04o: %s", mode, log.String())
	}
	require.NoError(t, os.Chmod(file, 0o602))
	_, err := New(Config{File: file, Logger: slog.New(slog.DiscardHandler)})
	require.ErrorIs(t, err, ErrFile)
	require.ErrorContains(t, err, "has the mode 0602, so every user of this machine may add operators: chmod o-w")
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(line("ann", "viewer") + "# x\n" + line("bob", "admin")))
	f.Add([]byte("ann admin x\n\x00"))
	f.Fuzz(func(t *testing.T, text []byte) {
		operators, err := parse(text)
		if err == nil {
			left := operators.restricted(text)
			require.Equal(t, operators, left, "a file leaves its own operators")
		}
		require.LessOrEqual(t, len(operators), maxOperators)
		for _, e := range operators {
			require.True(t, isName(e.Name) && e.Role >= Viewer && e.Role <= Admin)
		}
	})
}
