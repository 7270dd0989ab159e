package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/google/uuid"

	"stampede/internal/connect"
	"stampede/internal/progress"
	"stampede/reservation"
	"stampede/upkeep/doctor"
)

type doctorCmd struct {
	look
	redisFlag
	databaseFlag
	outputFlag
	JWKSURL string    `name:"jwks-url" env:"STAMPEDE_JWKS_URL" placeholder:"URL" help:"Key set for the buyers' tokens, to be checked as well."`
	Sale    uuid.UUID `env:"STAMPEDE_DOCTOR_SALE" placeholder:"ID" help:"Sale for whose orders Redis must have enough memory (default: all sales together)."`
}

func (c *doctorCmd) Run(ctx context.Context, s *streams) error {
	ctx, cancel := context.WithTimeout(ctx, 2*askTimeout)
	defer cancel()
	ctx, stop := s.watch(ctx, "asking Redis")
	defer stop()
	findings, servers, err := c.examine(ctx)
	if err != nil {
		return err
	}
	all := append([]doctor.Finding{}, findings...) // [] rather than null
	err = c.write(s.out, all, func(w io.Writer) error {
		_, _ = fmt.Fprintln(w, servers)
		return doctor.WriteText(w, findings)
	})
	return verdict(err, doctor.Any(findings, doctor.Unsafe), doctor.Any(findings, doctor.Away))
}

// examine checks both servers. A server that does not answer is a finding; the other one is still checked.
func (c *doctorCmd) examine(ctx context.Context) (findings []doctor.Finding, servers string, err error) {
	rdb, err := connect.Control(c.RedisURL)
	if err != nil {
		return nil, "", err
	}
	defer func() { _ = rdb.Close() }()
	pool, err := connect.Postgres(ctx, c.DatabaseURL, 1)
	if err != nil {
		return nil, "", err
	}
	defer pool.Close()

	var keys []doctor.Finding
	if c.JWKSURL != "" {
		progress.Step(ctx, "fetching the key set")
		keys = doctor.KeySet(ctx, c.JWKSURL)
		progress.Step(ctx, "asking Redis")
	}
	findings, err = doctor.Redis(ctx, rdb, reservation.OperatorRights)
	if err != nil {
		findings = append(findings, away("redis", "REDIS_URL", "nothing can be sold", err))
	}
	progress.Step(ctx, "asking Postgres")
	more, err := doctor.Postgres(ctx, pool)
	if err != nil {
		more = append(more, away("postgres", "DATABASE_URL", "accepted orders wait in Redis, unconfirmed", err))
	}
	findings = append(findings, more...)
	progress.Step(ctx, "comparing clocks")
	more, _ = doctor.Clocks(ctx, rdb, pool) // a server that does not answer is reported above
	findings = append(findings, more...)
	progress.Step(ctx, "counting the units on sale")
	more, err = doctor.Memory(ctx, rdb, pool, c.Sale)
	if errors.Is(err, reservation.ErrSaleNotFound) {
		return nil, "", err
	} // any other error is that of a server reported above, or a missing schema
	return slices.Concat(findings, more, keys), doctor.Servers(ctx, rdb, pool), nil
}

func away(server, variable, why string, err error) doctor.Finding {
	text, _ := unreached(err)
	return doctor.Finding{Severity: doctor.Away, Server: server, What: text, Why: why, Mend: startOr(variable)}
}
