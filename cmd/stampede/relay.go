package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"stampede/internal/connect"
	"stampede/internal/telemetry"
	"stampede/internal/tracing"
	"stampede/relay"
	"stampede/relay/target"
)

// relayPostgresConns is a connection for each target, and the rest.
const relayPostgresConns = target.Max + 4

type relayCmd struct {
	Run    relayRunCmd    `cmd:"" help:"Run a relay: hand the events of orders and sales on to the targets. Several relays share the targets."`
	Add    relayAddCmd    `cmd:"" help:"Add a target. With the name and URL of one that exists, replace its secrets and --allow-private."`
	List   relayListCmd   `cmd:"" help:"List the targets: how far each is, its last error and its next try."`
	Pause  relayPauseCmd  `cmd:"" help:"Send no events to a target until it is resumed. It misses none."`
	Resume relayResumeCmd `cmd:"" help:"Send events to a target that is paused, disabled or waiting after failures, at once."`
	Replay relayReplayCmd `cmd:"" help:"Send all events from a time or an event on to a target again, or skip those before."`
	Remove relayRemoveCmd `cmd:"" help:"Remove a target. It gets no more events."`
}

// relayFlags are common to relay run and dev.
type relayFlags struct {
	RelaySource string `default:"/stampede" placeholder:"URI" help:"Source of all events that the relay sends (${default})."`
}

func (f relayFlags) Validate() error {
	return checkFlag(f.RelaySource != "", "--relay-source", "empty", "a URI")
}

type relayRunCmd struct {
	storesFlags
	relayFlags
	profileFlag
	DrainTimeout time.Duration `default:"10s" placeholder:"DURATION" help:"How long a stopping relay waits for receivers to answer (${default})."`
	MetricsAddr  string        `default:":9091" type:"addr" placeholder:"HOST:PORT" help:"Address for /metrics, /livez and /readyz (${default})."`
}

// Validate is called by kong.
func (c *relayRunCmd) Validate() error {
	return cmp.Or(c.keysFlags.Validate(), c.relayFlags.Validate(), c.profileFlag.check(c.MetricsAddr),
		wantAtLeast("--drain-timeout", c.DrainTimeout, time.Millisecond))
}

func (c *relayRunCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	raiseGOGC()
	registry := telemetry.NewRegistry()
	tracer, err := traceFlag{}.tracer(ctx, "stampede-relay", registry, logger)
	if err != nil {
		return err
	}
	defer tracer.Close()
	b, err := c.open(ctx, relayPostgresConns, logger,
		connect.Service("relay"))
	if err != nil {
		return err
	}
	defer b.Close()
	if err := checkSchema(ctx, b.pool, logger); err != nil {
		return err
	}
	pools := connect.NewPools("relay")
	pools.Redis("control", b.redis)
	pools.Postgres("relay", b.pool)
	if err := pools.Register(registry); err != nil {
		return err
	}
	r, err := c.relay(b, c.DrainTimeout, s.out, registry, tracer, logger)
	if err != nil {
		return err
	}
	running, ctx := errgroup.WithContext(ctx)
	running.Go(func() error { return c.serveStores(ctx, "relay", c.MetricsAddr, registry, b) })
	running.Go(func() error { return r.Run(ctx) })
	return running.Wait()
}

// relay returns a relay on the stores of b. A drain time of 0 stands for the default.
func (f relayFlags) relay(
	b *backend, drain time.Duration, out io.Writer, registry prometheus.Registerer, tracer *tracing.Tracer,
	logger *slog.Logger,
) (*relay.Relay, error) {
	host, _ := os.Hostname() // an empty one is only less telling
	return relay.New(relay.Config{
		Pool: b.pool, Redis: b.redis, Keys: b.keys, Name: host + "-" + strconv.Itoa(os.Getpid()), Source: f.RelaySource,
		DrainTimeout: drain, Stdout: telemetry.Unbroken(out), Agent: "stampede/" + telemetry.BuildVersion(),
		Logger: logger, Registerer: registry, Tracer: tracer,
	})
}

// eventsAfter says what a target gets.
func eventsAfter(position int64) string { return fmt.Sprintf("events after position %d", position) }

// secretFileMax bounds what is read of a file of secrets.
const secretFileMax = 4 << 10

// withTargets runs do with the targets of a database.
func (f databaseFlag) withTargets(ctx context.Context, do func(*pgxpool.Pool, *target.Store) error) error {
	return f.withPool(ctx, 2, func(pool *pgxpool.Pool) error { return do(pool, target.NewStore(pool)) })
}

// targetArg names the target that a command is about.
type targetArg struct {
	Name string `arg:"" help:"Name of the target."`
}

// Validate is called by kong.
func (a targetArg) Validate() error {
	if err := target.CheckName(a.Name); err != nil {
		return &usageError{err}
	}
	return nil
}

// named adds the name to an error.
func (a targetArg) named(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("target %s: %w", a.Name, err)
}

// changed prints what became of the target: as JSON its new standing, as relay list does.
func (a targetArg) changed(
	ctx context.Context, s *streams, output outputFlag, targets *target.Store, became string,
) error {
	if !output.json() {
		_, err := fmt.Fprintf(s.out, "target %s %s\n", a.Name, became)
		return err
	}
	all, err := targets.List(ctx)
	if err != nil {
		return err
	}
	all = slices.DeleteFunc(all, func(t target.Standing) bool { return t.Name != a.Name })
	return writeAll(output, s.out, all, targetJSON, nil)
}

type relayAddCmd struct {
	databaseFlag
	outputFlag
	targetArg
	URL          string `arg:"" optional:"" name:"url" help:"https://host/path, redis-stream://host:6379/0?stream=NAME, rediss-stream://…, kafka://host:9092,host:9092/TOPIC or stdout."`
	URLFile      string `env:"STAMPEDE_RELAY_URL_FILE" placeholder:"FILE" help:"File with the URL, in place of the argument, which others on this host can see; /dev/stdin for standard input."`
	SecretFile   string `env:"STAMPEDE_RELAY_SECRET_FILE" placeholder:"FILE" help:"Secrets that sign webhooks, one a line, the newest first: whsec_ and 24 to 64 bytes in base64."`
	AllowPrivate bool   `env:"STAMPEDE_RELAY_ALLOW_PRIVATE" help:"Allow a webhook on http:// and on addresses that are not of the public internet."`
	From         string `default:"now" env:"STAMPEDE_RELAY_FROM" placeholder:"PLACE" help:"First event: now, start, a time such as 2026-11-23T20:00:00Z or -1h, or the id of an event (${default})."`
}

func (c *relayAddCmd) Run(ctx context.Context, s *streams) error {
	to, err := c.address()
	if err != nil {
		return &usageError{err}
	}
	secrets, err := c.secrets(to)
	if err != nil {
		return &usageError{err}
	}
	return c.withTargets(ctx, func(pool *pgxpool.Pool, targets *target.Store) error {
		switch err := targets.Renew(ctx, c.Name, to, secrets, c.AllowPrivate); {
		case err == nil:
			return c.changed(ctx, s, c.outputFlag, targets,
				fmt.Sprintf("has its new settings and %d secrets; it continues where it was", len(secrets)))
		case !errors.Is(err, target.ErrNotFound):
			return err
		}
		position, err := target.PositionAt(ctx, pool, placeOf(c.From))
		if err != nil {
			return placeError(err)
		}
		if err := targets.Add(ctx, c.Name, to, secrets, c.AllowPrivate, position); err != nil {
			return c.named(err)
		}
		return c.changed(ctx, s, c.outputFlag, targets, "gets the "+eventsAfter(position))
	})
}

func (c *relayAddCmd) address() (*target.Address, error) {
	url := c.URL
	switch {
	case (url == "") == (c.URLFile == ""):
		return nil, errors.New("want either a URL or a --url-file")
	case url == "":
		var err error
		if url, err = readSecret(c.URLFile); err != nil {
			return nil, err
		}
	}
	return target.ParseAddress(url)
}

func (c *relayAddCmd) secrets(to *target.Address) ([][]byte, error) {
	switch {
	case to.Kind != target.Webhook && (c.SecretFile != "" || c.AllowPrivate):
		return nil, errors.New("--secret-file and --allow-private are for webhooks only")
	case to.Kind != target.Webhook:
		return nil, nil
	case !strings.HasPrefix(to.URL, "https:") && !c.AllowPrivate:
		return nil, errors.New("a webhook on http:// can be read and changed on its way; --allow-private allows it")
	case c.SecretFile == "":
		return nil, fmt.Errorf("a webhook needs a --secret-file: %w", target.ErrSecret)
	}
	file, err := os.Open(c.SecretFile)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	text, err := io.ReadAll(io.LimitReader(file, secretFileMax))
	if err != nil {
		return nil, err
	}
	secrets, err := target.ParseSecrets(string(text))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.SecretFile, err)
	}
	return secrets, nil
}

// placeOf returns a place in the log; a time may be written in each way of a moment.
func placeOf(text string) string {
	var at moment
	if at.UnmarshalText([]byte(text)) != nil {
		return text
	}
	return at.Format(time.RFC3339Nano)
}

// placeError makes a place that cannot be found an error of the command line.
func placeError(err error) error {
	if errors.Is(err, target.ErrPlace) {
		return &usageError{err}
	}
	return err
}

type relayListCmd struct {
	readOnly
	databaseFlag
	outputFlag
}

func (c *relayListCmd) Run(ctx context.Context, s *streams) error {
	return c.withTargets(ctx, func(_ *pgxpool.Pool, targets *target.Store) error {
		all, err := targets.List(ctx)
		if err != nil {
			return err
		}
		return writeAll(c.outputFlag, s.out, all, targetJSON, writeTargets)
	})
}

func writeTargets(w io.Writer, all []target.Standing) error {
	t := newTable(w, "NAME", "STATE", "POSITION", "LAG", "WAITING", "FAILURES", "NEXT TRY", "LAST ERROR", "URL")
	now := time.Now()
	for i := range all {
		one := &all[i]
		lastError := ""
		if one.Failures > 0 { // else it is over; as JSON it has its time
			lastError = one.LastError
		}
		t.row(one.Name, one.State, one.Position, one.Lag(), one.Waiting(now).Round(time.Second), one.Failures,
			second(time.Time(one.RetryAt)), orDash(lastError), printable(target.Redacted(one.URL)))
	}
	return t.Flush()
}

// targetView is a target as JSON.
type targetView struct {
	Name         string       `json:"name"`
	URL          string       `json:"url"`
	State        target.State `json:"state"`
	Position     int64        `json:"position"`
	LagEvents    int64        `json:"lag_events"`
	LagSeconds   float64      `json:"lag_seconds"`
	Failures     int          `json:"failures"`
	LastError    string       `json:"last_error,omitempty"`
	LastErrorAt  time.Time    `json:"last_error_at,omitzero"`
	RetryAt      time.Time    `json:"retry_at,omitzero"`
	DeliveredAt  time.Time    `json:"delivered_at,omitzero"`
	Holder       string       `json:"holder,omitempty"`
	Secrets      int          `json:"secrets"`
	AllowPrivate bool         `json:"allow_private"`
	CreatedAt    time.Time    `json:"created_at"`
}

func targetJSON(t target.Standing) targetView {
	return targetView{
		t.Name, target.Redacted(t.URL), t.State, t.Position, t.Lag(), t.Waiting(time.Now()).Seconds(), t.Failures,
		printable(t.LastError), utc(time.Time(t.LastErrorAt)), utc(time.Time(t.RetryAt)), utc(time.Time(t.DeliveredAt)),
		t.Holder, len(t.Secrets), t.AllowPrivate, t.CreatedAt.UTC(),
	}
}

// utc leaves the zero time as it is.
func utc(t time.Time) time.Time {
	if t.IsZero() {
		return t
	}
	return t.UTC()
}

// targetChangeFlags are what the commands need that change a target.
type targetChangeFlags struct {
	databaseFlag
	outputFlag
	targetArg
}

// setState gives the target a state, and prints what became of it.
func (c *targetChangeFlags) setState(ctx context.Context, s *streams, state target.State, became string) error {
	return c.withTargets(ctx, func(_ *pgxpool.Pool, targets *target.Store) error {
		if err := targets.SetState(ctx, c.Name, state); err != nil {
			return c.named(err)
		}
		return c.changed(ctx, s, c.outputFlag, targets, became)
	})
}

type relayPauseCmd struct{ targetChangeFlags }

func (c *relayPauseCmd) Run(ctx context.Context, s *streams) error {
	return c.setState(ctx, s, target.Paused, "is paused")
}

type relayResumeCmd struct{ targetChangeFlags }

func (c *relayResumeCmd) Run(ctx context.Context, s *streams) error {
	return c.setState(ctx, s, target.Active, "gets events")
}

type relayReplayCmd struct {
	databaseFlag
	outputFlag
	targetArg
	From  string `env:"STAMPEDE_RELAY_REPLAY_FROM" xor:"place" required:"" placeholder:"PLACE" help:"First event: start, now, a time such as 2026-11-23T20:00:00Z or -1h, or the id of an event."`
	After string `env:"STAMPEDE_RELAY_REPLAY_AFTER" xor:"place" required:"" placeholder:"EVENT" help:"Continue behind this event, for example because the receiver can never take it."`
}

func (c *relayReplayCmd) Run(ctx context.Context, s *streams) error {
	return c.withTargets(ctx, func(pool *pgxpool.Pool, targets *target.Store) error {
		var position int64
		var err error
		if c.From != "" {
			position, err = target.PositionAt(ctx, pool, placeOf(c.From))
		} else {
			position, err = target.EventPosition(ctx, pool, c.After)
		}
		if err != nil {
			return placeError(err)
		}
		was, err := targets.SetPosition(ctx, c.Name, position)
		if err != nil {
			return c.named(err)
		}
		return c.changed(ctx, s, c.outputFlag, targets, target.Replay(was, position, strconv.FormatInt(position, 10)))
	})
}

type relayRemoveCmd struct {
	databaseFlag
	outputFlag
	yesFlag
	targetArg
}

func (c *relayRemoveCmd) Run(ctx context.Context, s *streams) error {
	if err := c.askable(s); err != nil {
		return err
	}
	return c.withTargets(ctx, func(_ *pgxpool.Pool, targets *target.Store) error {
		if err := c.confirm(ctx, s, func() (string, error) { return c.question(ctx, targets) }); err != nil {
			return err
		}
		if err := targets.Remove(ctx, c.Name); err != nil {
			return c.named(err)
		}
		return c.print(s.out, struct {
			Name    string `json:"name"`
			Removed bool   `json:"removed"`
		}{c.Name, true}, "target %s is removed\n", c.Name)
	})
}

func (c *relayRemoveCmd) question(ctx context.Context, targets *target.Store) (string, error) {
	all, err := targets.List(ctx)
	if err != nil {
		return "", err
	}
	i := slices.IndexFunc(all, func(t target.Standing) bool { return t.Name == c.Name })
	if i < 0 {
		return "", c.named(target.ErrNotFound)
	}
	return fmt.Sprintf("Target %s (%s) is removed, with its secrets and its position %d; it lacks %d positions.", c.Name,
		target.Redacted(all[i].URL), all[i].Position, all[i].Lag()), nil
}
