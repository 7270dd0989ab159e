package archive

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/internal/figure"
	"stampede/sql"
	"stampede/upkeep/projection"
)

// findingsMax bounds the findings of a report. The others are counted.
const findingsMax = 100

// Report is the audit of one file.
type Report struct {
	Path string    `json:"path"`
	Sale uuid.UUID `json:"sale_id"`
	Name string    `json:"name"`
	Trailer
	WrittenAt time.Time `json:"written_at"`
	Stock     int64     `json:"stock"`
	Sold      int64     `json:"sold"`
	Findings  []Finding `json:"findings"`
	Found     int64     `json:"found"`
}

// Finding is one violation of a promise in a file.
type Finding struct {
	Promise string     `json:"promise"`
	Order   *uuid.UUID `json:"order_id,omitempty"`
	What    string     `json:"what"`
}

// Audit checks a file: that it is whole, and what it says of S1 to S5. Postgres compares in temporary tables and is not
// changed. The error is ErrDamagedFile, or one of the file or of Postgres.
func Audit(ctx context.Context, pool *pgxpool.Pool, path string) (Report, error) {
	header, trailer, err := Verify(path)
	if err != nil {
		return Report{}, err
	}
	r := Report{Path: path, Sale: header.SaleID, Trailer: trailer, WrittenAt: header.WrittenAt, Findings: []Finding{}}
	var row struct {
		Name  string `json:"name"`
		Stock int64  `json:"stock"`
		Sold  int64  `json:"sold"`
	}
	if err := json.Unmarshal(header.Sale, &row); err != nil {
		return r, fmt.Errorf("%s: %w: its sale: %w", path, ErrDamagedFile, err)
	}
	r.Name, r.Stock, r.Sold = row.Name, row.Stock, row.Sold
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SET LOCAL statement_timeout = 0"); err != nil {
			return err
		}
		if err := load(ctx, tx, path); err != nil {
			return err
		}
		return r.check(ctx, tx)
	})
	if err != nil {
		return r, fmt.Errorf("audit %s: %w", path, err)
	}
	return r, nil
}

func (r *Report) add(f Finding) {
	if r.Found++; len(r.Findings) < findingsMax {
		r.Findings = append(r.Findings, f)
	}
}

func (r *Report) check(ctx context.Context, tx pgx.Tx) error {
	query := strings.Replace(sql.ArchiveAudit, "{{replay}}", projection.Replayed("archived_events"), 1)
	rows, _ := tx.Query(ctx, query, r.Sale, r.Stock, r.Sold) // its error comes with the rows
	var f Finding
	_, err := pgx.ForEachRow(rows, []any{&f.Promise, &f.Order, &f.What}, func() error {
		r.add(f)
		f.Order = nil
		return nil
	})
	return err
}

// WriteText writes the report for operators.
func (r *Report) WriteText(w io.Writer) error {
	verdict := "kept"
	if r.Found > 0 {
		verdict = "BROKEN"
	}
	const line = "%s  sale %s %s: S1 to S5 %s, %s orders with %s events, %s units sold of %s\n"
	_, err := fmt.Fprintf(w, line, r.Path, r.Sale, figure.Printable(r.Name), verdict,
		figure.Count(r.Orders), figure.Count(r.Events), figure.Count(r.Sold), figure.Count(r.Stock))
	for _, f := range r.Findings {
		about := ""
		if f.Order != nil {
			about = "order " + f.Order.String() + ": "
		}
		if err == nil {
			_, err = fmt.Fprintf(w, "      - %s %s%s\n", f.Promise, about, figure.Printable(f.What))
		}
	}
	if more := r.Found - int64(len(r.Findings)); more > 0 && err == nil {
		_, err = fmt.Fprintf(w, "      … and %s more\n", figure.Count(more))
	}
	return err
}
