// Package sql holds the schema and the queries as files, and brings a database to that schema.
package sql

import "embed"

//go:embed migrations/*.sql
var migrations embed.FS
