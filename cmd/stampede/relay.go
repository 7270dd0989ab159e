package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"time"

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
