package main

import (
	"errors"
	"strings"

	"stampede/internal/apiclient"
	"stampede/internal/telemetry"
)

// optionalDatabases are the URLs of commands that can work through an ingress instead.
type optionalDatabases struct {
	RedisURL    string `name:"redis-url" env:"REDIS_URL" placeholder:"URL" help:"Redis, as redis://user:password@host:6379/0, redis+cluster://user:password@a:6379,b:6379 or redis+sentinel://user:password@a:26379,b:26379/master/0. Not needed with --server."`
	DatabaseURL string `name:"database-url" env:"DATABASE_URL" placeholder:"URL" help:"Postgres, as postgres://user:password@host:5432/database. Not needed with --server."`
}

// serverFlag is for commands that can work through an ingress instead of on the databases.
type serverFlag struct {
	Server     string `placeholder:"URL" help:"Ingress to work through, such as https://shop.example, instead of the databases. The server records the operator of the token."`
	AdminToken string `placeholder:"TOKEN" help:"Bearer token of an operator, for --server."`
}

func (f optionalDatabases) stores(keys keysFlags) storesFlags {
	return storesFlags{redisFlag{f.RedisURL}, databaseFlag{f.DatabaseURL}, keys}
}

// check says what is missing, as kong does for required flags.
func (f *serverFlag) check(databases optionalDatabases) error {
	if f.Server != "" {
		_, err := apiclient.New(f.Server, "", "")
		return serverError(err)
	}
	var missing []string
	if databases.RedisURL == "" {
		missing = append(missing, "--redis-url=URL (or REDIS_URL)")
	}
	if databases.DatabaseURL == "" {
		missing = append(missing, "--database-url=URL (or DATABASE_URL)")
	}
	if len(missing) > 0 {
		return usagef("missing flags: %s; or --server=URL (or STAMPEDE_SERVER) instead", strings.Join(missing, ", "))
	}
	return nil
}

// withClient calls do with a client of the server.
func (f *serverFlag) withClient(do func(*apiclient.Client) error) error {
	client, err := apiclient.New(f.Server, f.AdminToken, "stampede/"+telemetry.BuildVersion())
	if err != nil {
		return serverError(err)
	}
	defer client.Close()
	return serverError(do(client))
}

// serverError makes what another setting or argument corrects a usage error.
func serverError(err error) error {
	switch {
	case errors.Is(err, apiclient.ErrURL):
		return usagef("--server: %w", err)
	case errors.Is(err, apiclient.ErrToken), errors.Is(err, apiclient.ErrInvalid):
		return &usageError{err}
	}
	return err
}

// noServerFlag refuses --server where only the databases will do.
type noServerFlag struct {
	Server string `hidden:"" env:"-" placeholder:"URL" help:"Not supported."`
}

func (f noServerFlag) validate(why string) error {
	if f.Server != "" {
		return usagef("this command has no --server: %s", why)
	}
	return nil
}

// postgresOrServer is for commands that need Postgres only, or an ingress.
type postgresOrServer struct {
	DatabaseURL string `name:"database-url" env:"DATABASE_URL" placeholder:"URL" help:"Postgres, as postgres://user:password@host:5432/database. Not needed with --server."`
	serverFlag
}

// checkPlace says what is missing.
func (f *postgresOrServer) checkPlace() error {
	return f.check(optionalDatabases{RedisURL: "not needed", DatabaseURL: f.DatabaseURL})
}

func (f *postgresOrServer) databaseFlag() databaseFlag { return databaseFlag{f.DatabaseURL} }
