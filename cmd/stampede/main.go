// Command stampede sells a limited stock to a crowd. This package only wires: a file for a
// subcommand, or for some of one kind; what several of them share is in settings.go, backend.go and output.go.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/alecthomas/kong"
	"github.com/jackc/pgx/v5/pgconn"

	"stampede/internal/connect"
	"stampede/internal/operators"
	"stampede/internal/progress"
	"stampede/internal/telemetry"
	"stampede/ledger/deadletter"
	"stampede/ledger/problems"
	"stampede/reservation/order"
	"stampede/sql"
	"stampede/upkeep/archive"
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// cli is the command line. Every flag can also be set by an environment variable: its env tag, or
// else STAMPEDE_ and its name.
type cli struct {
	Log      logFlags `embed:"" prefix:"log-"`
	Progress string   `default:"on" enum:"on,off" placeholder:"MODE" help:"Show on standard error what a command does that takes longer than two seconds: on or off (${default})."`

	Dev         devCmd         `cmd:"" help:"Run everything on this machine: ingress and worker in one process, with private Redis and Postgres unless URLs are given."`
	Demo        demoCmd        `cmd:"" help:"Run a sale with a crowd and a crash, and print the audit's verdict. Starts private servers unless REDIS_URL and DATABASE_URL are set."`
	Serve       serveCmd       `cmd:"" help:"Run an ingress: take orders over HTTP."`
	Work        workCmd        `cmd:"" help:"Run a fulfillment worker: write accepted orders to Postgres."`
	Migrate     migrateCmd     `cmd:"" help:"Bring the database to the schema of this version, or back."`
	Sale        saleCmd        `cmd:"" help:"Create, show and change sales."`
	Order       orderCmd       `cmd:"" help:"Look orders up, cancel one, and export them."`
	Payment     paymentCmd     `cmd:"" help:"Look payments up, note refunds, and import a payment provider's list."`
	Draw        drawCmd        `cmd:"" help:"Draw the units of sales, and verify draws."`
	Load        loadCmd        `cmd:"" help:"Send an open-loop crowd of buyers to an ingress and verify every order."`
	Audit       auditCmd       `cmd:"" help:"Check the promises against Redis and Postgres, but S6, which depends on the settings of Redis: see stampede doctor. Exit status 1 if one is broken, 3 if something could not be checked."`
	Rebuild     rebuildCmd     `cmd:"" help:"Rebuild the stock in Redis from Postgres. Workers do this automatically after a loss of Redis. Sales are closed meanwhile."`
	Reconcile   reconcileCmd   `cmd:"" help:"Repair differences between Redis and Postgres. Exit status 1 if some remain, 3 if something could not be checked."`
	Projections projectionsCmd `cmd:"" help:"Rebuild what is derived from the log of orders."`
	Doctor      doctorCmd      `cmd:"" help:"Check Redis, each node of a cluster, and Postgres for unsafe settings, Redis for enough memory for the units on sale, and the key set of the buyers' tokens for keys that cannot be used. Measure round trips and syncs, and say what they cost. Exit status 1 if a finding is unsafe, 3 if a server does not answer."`
	DLQ         dlqCmd         `cmd:"" name:"dlq" help:"List, show, replay and discard dead letters."`
	Relay       relayCmd       `cmd:"" help:"Hand the events of orders, payments and sales on to webhooks, Redis streams, Kafka or standard output."`
	Dashboard   dashboardCmd   `cmd:"" help:"Run the operators' dashboard: what the installation does, what is wrong, and what to do."`
	Top         topCmd         `cmd:"" help:"Watch the installation in the terminal: what is wrong, sales, rates and processes. Exit status 3 if nothing could be looked at."`
	Healthcheck healthcheckCmd `cmd:"" help:"Ask a running ingress or worker whether it is ready. Exit status 1 if it is not."`
	Completion  completionCmd  `cmd:"" help:"Print a script that completes commands, flags and values in a shell."`
	Complete    completeCmd    `cmd:"" hidden:"" help:"Complete the last word, for the scripts of stampede completion."`
	Version     versionCmd     `cmd:"" help:"Print the version of this program."`

	ShowVersion kong.VersionFlag `name:"version" env:"-" help:"Print the version of this program."`
}

// streams is where a command writes: its result to out, everything else to err. From in it reads answers to questions.
type streams struct {
	out, err io.Writer
	in       *os.File
	progress *progress.Line // nil to show none
}

// watch shows on standard error what is done with the context that it returns, until stop is called, if it takes long.
func (s *streams) watch(ctx context.Context, doing string) (_ context.Context, stop func()) {
	s.out = s.progress.Over(s.out)
	return s.progress.Start(ctx, doing)
}

// untilAsked returns a context that ends when the process is asked to stop: by SIGINT, SIGTERM or, unless nohup has it
// ignored, SIGHUP. The next SIGINT or SIGTERM ends the process immediately, as without a handler. A further SIGHUP does
// not: a terminal that closes sends several, and systemd may send one behind SIGTERM. The other signals keep what Go
// does with them: SIGQUIT prints the stacks and ends the process, SIGTSTP, SIGTTIN and SIGTTOU stop it until SIGCONT.
func untilAsked() (ctx context.Context, restore func()) {
	ctx, hangups := context.Background(), func() {}
	if !signal.Ignored(syscall.SIGHUP) {
		ctx, hangups = signal.NotifyContext(ctx, syscall.SIGHUP)
	}
	ctx, others := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(ctx, others)
	return ctx, func() {
		others()
		hangups()
	}
}

// run runs one command and returns the exit status.
func run(args []string, stdout, to io.Writer) (status int) {
	ctx, restore := untilAsked()
	defer restore()
	stderr := telemetry.NewStderr(to)
	defer stderr.Close()

	// kong ends the process after --help; here it ends the call.
	type exit int
	defer func() {
		switch r := recover().(type) {
		case nil:
		case exit:
			status = int(r)
		default:
			panic(r)
		}
	}()
	s := &streams{out: stdout, err: stderr, in: os.Stdin}
	var flags cli
	parser := newParser(&flags,
		kong.Writers(stdout, stderr),
		kong.Exit(func(code int) { panic(exit(code)) }),
		kong.BindTo(ctx, (*context.Context)(nil)),
		kong.Bind(s),
	)
	if len(args) == 0 {
		args = []string{"--help"}
	}
	command, err := parser.Parse(arranged(parser.Model.Node, args))
	if err != nil {
		return reportError(stderr, unparsed(err))
	}
	if !command.Selected().Hidden {
		warnOfStrays(stderr, parser.Model.Node)
	}
	if flags.Progress == "on" {
		s.progress = progress.New(stderr, isTerminal(stderr))
	}
	stderr.SetFormat(flags.Log.Format)
	logger, err := flags.Log.logger(s.progress.Over(stderr))
	if err != nil {
		return reportError(stderr, &usageError{err})
	}
	command.Bind(logger)
	err = withFlags(command.Selected(), command.Run())
	if onlyReads(command.Selected()) {
		err = unseen(err)
	}
	return reportError(stderr, err)
}

// newParser returns the command line of the program.
func newParser(flags *cli, options ...kong.Option) *kong.Kong {
	parser, err := kong.New(flags, append([]kong.Option{
		kong.Name("stampede"),
		kong.Description("Sell a limited stock to a crowd: decided in memory in one atomic step, answered immediately, " +
			"written to Postgres exactly once. Begin with stampede demo, and try it by hand with stampede dev.\n\n" +
			exitStatuses),
		kong.DefaultEnvars("STAMPEDE"),
		kong.Vars{"version": "stampede " + telemetry.BuildVersion()},
		defaults,
		saleIDs,
		withExample[time.Duration]("90s"),
		withExample[int]("100"),
		withExample[int64]("100"),
		withExample[float64]("0.5"),
		addresses,
		kong.Resolvers(secretsFromFiles),
		kong.ValueFormatter(secretsHelp),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, FlagsLast: true}),
	}, options...)...)
	if err != nil {
		panic(err) // the tags of cli are wrong
	}
	return parser
}

// The exit statuses.
const (
	exitOK     = 0
	exitFailed = 1 // also if a promise is broken, a setting is unsafe or a server is not ready
	exitUsage  = 2 // the command line or the configuration is wrong
	// exitUnknown: something could not be checked, for example because a server did not answer; what was checked
	// is in order.
	exitUnknown = 3
)

// exitStatuses is part of the help.
const exitStatuses = "Exit status: 0, all is well; 1, a promise is broken, a setting is unsafe or the command failed; " +
	"2, the command line or a setting is wrong, and nothing was done; 3, something could not be looked at, for example " +
	"because a server does not answer."

// readOnly is embedded by commands that change nothing. If they cannot read what they show, their exit status is
// exitUnknown, because nothing is known to be wrong.
type readOnly struct{}

func (readOnly) onlyReads() {}

// onlyReads reports whether a command embeds readOnly.
func onlyReads(command *kong.Node) bool {
	if command == nil || !command.Target.CanAddr() {
		return false
	}
	_, reads := command.Target.Addr().Interface().(interface{ onlyReads() })
	return reads
}

// unseen wraps the error of a command that only looks, unless the error is what it found: that there is no such thing,
// that a process is not ready, or that a file is damaged or cannot be written.
func unseen(err error) error {
	if known, ok := problems.Find(err); ok && known.Status == http.StatusNotFound {
		return err
	}
	for _, found := range []error{errBroken, errNotReady, deadletter.ErrNotFound, archive.ErrDamagedFile} {
		if errors.Is(err, found) {
			return err
		}
	}
	if _, file := errors.AsType[*fs.PathError](err); file {
		return err
	}
	return unchecked(err)
}

// errBroken ends a command whose output already shows what is wrong.
var errBroken = errors.New("a promise is broken")

// errUnchecked ends a command whose output already shows what could not be checked.
var errUnchecked = errors.New("something could not be checked")

// uncheckedError is the error of a command that could not read what it checks.
type uncheckedError struct{ err error }

func (e *uncheckedError) Error() string { return e.err.Error() }
func (e *uncheckedError) Unwrap() error { return e.err }

// unchecked wraps an error that prevented a check; nil stays nil.
func unchecked(err error) error {
	if err == nil {
		return nil
	}
	return &uncheckedError{err}
}

// usageError is an error that a change of the command line or configuration corrects.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func usagef(format string, a ...any) error { return &usageError{fmt.Errorf(format, a...)} }

// listenError names the setting behind an address on which a server could not listen.
func listenError(err error, variable, flag string) error {
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "listen" {
		return fmt.Errorf("%w: set %s (%s) to another address", err, variable, flag)
	}
	return err
}

// reportError prints the error and maps it to the exit status. This is the only place that does either.
func reportError(stderr io.Writer, err error) int {
	var (
		usage   *usageError
		invalid *order.InvalidError
		unknown *uncheckedError
	)
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errBroken), errors.Is(err, errRemaining):
		return exitFailed
	case errors.As(err, &usage), errors.As(err, &invalid),
		errors.Is(err, connect.ErrRedisURL), errors.Is(err, sql.ErrDatabaseURL), errors.Is(err, operators.ErrFile):
		say(stderr, err)
		return exitUsage
	case errors.Is(err, errUnchecked):
		return exitUnknown
	case errors.As(err, &unknown):
		say(stderr, err)
		return exitUnknown
	default:
		say(stderr, err)
		return exitFailed
	}
}

// say prints an error, which may quote what others wrote.
func say(stderr io.Writer, err error) {
	lines := strings.Split(message(err), "\n")
	for i := range lines {
		lines[i] = printable(lines[i])
	}
	_, _ = fmt.Fprintln(stderr, "stampede:", strings.Join(lines, "\n"))
}

// message is the text of an error. If a server was not reached, it names the setting that says where the server is.
func message(err error) string {
	text, setting := unreached(err)
	if setting == "" {
		return text
	}
	return text + ": " + startOr(setting)
}

func startOr(setting string) string {
	return "start the server, or set " + setting + " to the right one"
}

// unreached returns the text of an error, and the setting of the server that was not reached, or "". Of pgx, which
// tries each address with TLS and without, the text has each failure once.
func unreached(err error) (text, setting string) {
	text = err.Error()
	if failed, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		setting = "DATABASE_URL"
		if _, answered := errors.AsType[*pgconn.PgError](err); answered { // such as: too many clients
			setting = ""
		}
		tries := strings.Split(failed.Error(), "\n\t")
		once := strings.TrimSpace(tries[0] + " " + strings.Join(slices.Compact(tries[1:]), "; "))
		return strings.ReplaceAll(text, failed.Error(), once), setting
	}
	_, overHTTP := errors.AsType[*url.Error](err)
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" && !overHTTP {
		setting = "REDIS_URL"
	}
	return text, setting
}

type versionCmd struct{ outputFlag }

func (c *versionCmd) Run(s *streams) error {
	version := telemetry.BuildVersion()
	return c.print(s.out, struct {
		Version string `json:"version"`
	}{version}, "stampede %s\n", version)
}
