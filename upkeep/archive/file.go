package archive

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/internal/crashpoint"
	"stampede/internal/pg"
	"stampede/internal/progress"
	"stampede/sql"
	"stampede/upkeep/projection"
)

// A file is compressed by gzip. Its text is a line with the Header in JSON, the events of the orders in the text format
// of COPY, one in each line, a line "\.", the events of the payments likewise, the rows of the draw likewise from
// version 3 on, and a line with the Trailer. No event can be the line "\.".

const (
	// formatName and a version are in the header of every file. A reader refuses other ones.
	formatName = "stampede-sale-archive"
	// versionWithItems is the version of the file of a sale with items, and versionWithDraw of one whose units are offered
	// by rank, so that a program that does not know them refuses it. Other files have version 1.
	versionWithItems = 2
	versionWithDraw  = 3

	endOfEvents = "\\.\n"
	// headerMax bounds the header, in which the sale's own events are, and lineMax every other line.
	headerMax, lineMax = 256 << 20, 16 << 20
	bufferBytes        = 1 << 20
)

// ErrDamagedFile is returned for a file that is not whole, or is no archive.
var ErrDamagedFile = errors.New("the file is damaged")

// Header is the beginning of a file.
type Header struct {
	Format    string    `json:"format"`
	Version   int       `json:"version"`
	SaleID    uuid.UUID `json:"sale_id"`
	WrittenAt time.Time `json:"written_at"`
	// Sale is the row of the sale, Items are those of its items, and SaleEvents those of its events.
	Sale       json.RawMessage `json:"sale"`
	Items      json.RawMessage `json:"items,omitempty"`
	SaleEvents json.RawMessage `json:"sale_events"`
	// Columns are the columns of the events of orders, and PaymentColumns those of payments.
	Columns        []string `json:"columns"`
	PaymentColumns []string `json:"payment_columns"`
}

// Figures are what a file holds.
type Figures struct {
	Events int64 `json:"events"`
	Orders int64 `json:"orders"`
	// PaymentEvents are the events of payments.
	PaymentEvents int64 `json:"payment_events"`
	// LastPosition is the highest position of the events.
	LastPosition int64 `json:"last_position"`
	// DrawRows are the rows of its draw, or of its waiting list.
	DrawRows int64 `json:"draw_rows,omitzero"`
}

// Trailer is the end of a file. SHA256 is that of the text before it.
type Trailer struct {
	Figures
	SHA256 string `json:"sha256"`
}

// sections are how many lines of each section there should be in a file of that version.
func (f Figures) sections(version int) []int64 {
	if version < versionWithDraw {
		return []int64{f.Events, f.PaymentEvents}
	}
	return []int64{f.Events, f.PaymentEvents, f.DrawRows}
}

// writeFile writes a file. The events of orders and of payments, and the rows of a draw, are written by sections.
func writeFile(w io.Writer, h Header, f Figures, sections ...func(io.Writer) error) (Trailer, error) {
	buffer := bufio.NewWriterSize(w, bufferBytes)
	packed, err := gzip.NewWriterLevel(buffer, gzip.BestSpeed)
	if err != nil {
		return Trailer{}, err
	}
	sum := sha256.New()
	text := io.MultiWriter(packed, sum)
	h.Format = formatName
	if err := writeLine(text, h); err != nil {
		return Trailer{}, err
	}
	for _, section := range sections {
		if err := section(text); err != nil {
			return Trailer{}, err
		}
		if _, err := io.WriteString(text, endOfEvents); err != nil {
			return Trailer{}, err
		}
	}
	end := Trailer{Figures: f, SHA256: hex.EncodeToString(sum.Sum(nil))}
	return end, errors.Join(writeLine(packed, end), packed.Close(), buffer.Flush())
}

func writeLine(w io.Writer, value any) error {
	line, err := json.Marshal(value)
	if err != nil {
		return err
	}
	_, err = w.Write(append(line, '\n'))
	return err
}

// archiveFile is an archive that is read. Read returns the lines in the text format of COPY, those of each section
// until io.EOF.
type archiveFile struct {
	Header
	// Trailer is set when Read has returned io.EOF for each section: then the whole file was compared with it.
	Trailer

	file   *os.File
	packed *gzip.Reader
	text   *bufio.Reader
	sum    hash.Hash
	line   []byte  // the rest of the line to return
	lines  []int64 // of each section
	read   int     // how many of the sections
}

// open opens a file and reads its header.
func open(path string) (_ *archiveFile, err error) {
	f := &archiveFile{sum: sha256.New()}
	if f.file, err = os.Open(path); err != nil {
		return nil, err
	}
	if err := f.readHeader(); err != nil {
		_ = f.file.Close()
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return f, nil
}

func (f *archiveFile) readHeader() (err error) {
	if f.packed, err = gzip.NewReader(bufio.NewReaderSize(f.file, bufferBytes)); err != nil {
		return damaged(err)
	}
	f.text = bufio.NewReaderSize(f.packed, bufferBytes)
	line, err := f.readLine(headerMax)
	if err != nil {
		return err
	}
	_, _ = f.sum.Write(line) // returns no error
	if err := json.Unmarshal(line, &f.Header); err != nil || f.Format != formatName {
		return fmt.Errorf("%w: it is no archive of a sale", ErrDamagedFile)
	}
	if f.Header.Version < 1 || f.Header.Version > versionWithDraw {
		return fmt.Errorf("the file has version %d of the format, and this program reads versions 1 to %d", f.Header.Version,
			versionWithDraw)
	}
	f.lines = make([]int64, len(Figures{}.sections(f.Header.Version)))
	return nil
}

// Close closes the file.
func (f *archiveFile) Close() error { return f.file.Close() }

// Read implements io.Reader.
func (f *archiveFile) Read(p []byte) (n int, err error) {
	if len(f.line) == 0 {
		if err := f.next(); err != nil {
			return 0, err
		}
	}
	n = copy(p, f.line)
	f.line = f.line[n:]
	return n, nil
}

// next reads the next line, or the end.
func (f *archiveFile) next() error {
	if f.read == len(f.lines) {
		return io.EOF
	}
	line, err := f.readLine(lineMax)
	if err != nil {
		return err
	}
	_, _ = f.sum.Write(line)
	if string(line) != endOfEvents {
		f.line = line
		f.lines[f.read]++
		return nil
	}
	if f.read++; f.read < len(f.lines) {
		return io.EOF
	}
	if line, err = f.readLine(lineMax); err != nil {
		return err
	}
	if err := json.Unmarshal(line, &f.Trailer); err != nil {
		return damaged(err)
	}
	want := f.sections(f.Header.Version)
	if sum := hex.EncodeToString(f.sum.Sum(nil)); sum != f.SHA256 || !slices.Equal(f.lines, want) {
		return fmt.Errorf("%w: it has %d events with the checksum %s, and should have %d with %s", ErrDamagedFile,
			f.lines, sum, want, f.SHA256)
	}
	if rest, err := f.text.ReadByte(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("%w: %q follows its end: %w", ErrDamagedFile, rest, cmpErr(err))
	}
	return io.EOF
}

// cmpErr returns an error for data where none should be.
func cmpErr(err error) error {
	if err == nil {
		return errors.New("more data")
	}
	return err
}

// readLine reads a line with its end. The result is valid until the next call.
func (f *archiveFile) readLine(most int) ([]byte, error) {
	var long bytes.Buffer
	for {
		part, err := f.text.ReadSlice('\n')
		switch {
		case err == nil && long.Len() == 0:
			return part, nil
		case err != nil && !errors.Is(err, bufio.ErrBufferFull):
			return nil, damaged(err)
		}
		if _, _ = long.Write(part); long.Len() > most {
			return nil, fmt.Errorf("%w: a line is longer than %d bytes", ErrDamagedFile, most)
		}
		if err == nil {
			return long.Bytes(), nil
		}
	}
}

func damaged(err error) error {
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("%w: %w", ErrDamagedFile, err)
}

// Verify reads a whole file and compares it with its checksum.
func Verify(path string) (Header, Trailer, error) {
	f, err := open(path)
	if err != nil {
		return Header{}, Trailer{}, err
	}
	defer func() { _ = f.Close() }()
	for range f.lines {
		if _, err := io.Copy(io.Discard, f); err != nil {
			return Header{}, Trailer{}, fmt.Errorf("%s: %w", path, err)
		}
	}
	return f.Header, f.Trailer, nil
}

// ErrNotArchived is returned by Restore for a sale whose orders are in Postgres, or in another file.
var ErrNotArchived = errors.New("the sale is not archived in this file")

// Restored is a sale whose orders are back in Postgres.
type Restored struct {
	Sale uuid.UUID `json:"sale_id"`
	Figures
	// Took is the duration.
	Took time.Duration `json:"took_ns"`
}

// Restore brings the events of a file back, and makes the orders from them, in one transaction. The sale stays out of
// Redis. A sale that Postgres does not have is created, and its events get positions of this database, which no target
// of the relay lacks. The error may be ErrRunning, ErrDamagedFile or ErrNotArchived.
func Restore(ctx context.Context, pool *pgxpool.Pool, path string) (Restored, error) {
	began := time.Now()
	restored, err := restore(ctx, pool, path)
	if err != nil {
		return Restored{}, fmt.Errorf("restore %s: %w", path, err)
	}
	restored.Took = time.Since(began)
	return restored, nil
}

func restore(ctx context.Context, pool *pgxpool.Pool, path string) (Restored, error) {
	header, trailer, err := Verify(path)
	if err != nil {
		return Restored{}, err
	}
	conn, err := begin(ctx, pool)
	if err != nil {
		return Restored{}, err
	}
	defer conn.End()
	id := header.SaleID
	err = pg.InTransaction(ctx, conn, pgx.TxOptions{}, func(tx pgx.Tx) error {
		foreign, err := lockArchived(ctx, tx, header, trailer)
		if err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, sql.LedgerMakeMonths, []uuid.UUID{id}); err != nil {
			return err
		}
		if err := load(ctx, tx, path); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, sql.ArchiveForgetPayments, id); err != nil {
			return err
		}
		for _, statement := range []string{
			insert(sql.ArchiveInsertEvents, header.Columns, foreign),
			insert(sql.ArchiveInsertPayments, header.PaymentColumns, foreign),
		} {
			if _, err := tx.Exec(ctx, statement); err != nil {
				return fmt.Errorf("insert the events: %w", err)
			}
		}
		if err := insertDraw(ctx, tx, id); err != nil {
			return fmt.Errorf("insert the draw: %w", err)
		}
		progress.Step(ctx, "making the orders")
		if _, err := projection.RebuildSale(ctx, tx, id); err != nil {
			return fmt.Errorf("make the orders: %w", err)
		}
		crashpoint.Hit(crashpoint.ArchiveRestoring)
		return nil
	})
	return Restored{Sale: id, Figures: trailer.Figures}, err
}

// lockArchived locks the sale of a file, and marks it as not archived. A sale that Postgres lacks is created: then the
// file is of another database, or of this one after a time to which it was restored, and so are the positions in it.
func lockArchived(ctx context.Context, tx pgx.Tx, h Header, end Trailer) (foreign bool, err error) {
	var row map[string]any
	var events, items []map[string]any
	if err := errors.Join(json.Unmarshal(h.Sale, &row), json.Unmarshal(h.SaleEvents, &events),
		json.Unmarshal([]byte(cmp.Or(string(h.Items), "[]")), &items)); err != nil {
		return false, fmt.Errorf("%w: its sale: %w", ErrDamagedFile, err)
	}
	if _, err := tx.Exec(ctx, sql.CatalogLockItems, h.SaleID); err != nil {
		return false, err
	}
	locked, err := tx.Exec(ctx, sql.CatalogLockSale, h.SaleID)
	if err != nil {
		return false, err
	}
	if locked.RowsAffected() == 0 {
		foreign = true
		if _, err := tx.Exec(ctx, insert(sql.ArchiveInsertSale, slices.Collect(maps.Keys(row)), false), h.Sale); err != nil {
			return false, fmt.Errorf("create the sale: %w", err)
		}
		if len(items) > 0 {
			into := insert(sql.ArchiveInsertItems, slices.Collect(maps.Keys(items[0])), false)
			if _, err := tx.Exec(ctx, into, h.Items); err != nil {
				return false, fmt.Errorf("create its items: %w", err)
			}
		}
	} else {
		s, err := readState(ctx, tx, h.SaleID)
		switch {
		case err != nil:
			return false, err
		case !s.Archived:
			return false, fmt.Errorf("%w: its orders are in Postgres", ErrNotArchived)
		case s.SHA256 != end.SHA256:
			return false, fmt.Errorf("%w: Postgres names %s", ErrNotArchived, s.Path)
		}
	}
	if len(events) > 0 {
		into := insert(sql.ArchiveInsertSaleEvents, slices.Collect(maps.Keys(events[0])), foreign)
		if _, err := tx.Exec(ctx, into, h.SaleEvents); err != nil {
			return false, fmt.Errorf("add the events of the sale: %w", err)
		}
	}
	_, err = tx.Exec(ctx, sql.ArchiveMarkRestored, h.SaleID)
	return foreign, err
}

// drawTables are the tables of archive/draw.sql.
var drawTables = []string{"draws", "draw_chunks", "draw_ranks", "draw_offers"}

// insertDraw creates the draw of a file, unless Postgres has it.
func insertDraw(ctx context.Context, tx pgx.Tx, goods uuid.UUID) error {
	rows, _ := tx.Query(ctx, sql.ArchiveDrawTables, goods) // its error comes with the rows
	type table struct {
		Name    string
		Columns []string
	}
	tables, err := pgx.CollectRows(rows, pgx.RowToStructByName[table])
	if err != nil {
		return err
	}
	for _, t := range tables {
		if !slices.Contains(drawTables, t.Name) {
			return fmt.Errorf("%w: it has rows of %.50q", ErrDamagedFile, t.Name)
		}
		into := strings.ReplaceAll(sql.ArchiveInsertDraw, "{{table}}", t.Name)
		if _, err := tx.Exec(ctx, insert(into, t.Columns, false), goods); err != nil {
			return err
		}
	}
	return nil
}

// insert returns a statement for the columns that a file has: others of this version get their defaults.
func insert(statement string, columns []string, foreign bool) string {
	list := columnList(columns)
	values := list
	if foreign {
		values = strings.Replace(list, `"position"`, "-next_position()", 1)
	}
	return strings.NewReplacer("{{columns}}", list, "{{values}}", values).Replace(statement)
}

// load copies a file to the tables file_events, file_payments and file_draw.
func load(ctx context.Context, tx pgx.Tx, path string) error {
	if _, err := tx.Exec(ctx, sql.ArchiveTable); err != nil {
		return err
	}
	file, err := open(path)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	progress.Step(ctx, "copying the events of "+path)
	sections := []string{
		"file_events (" + columnList(file.Columns), "file_payments (" + columnList(file.PaymentColumns),
		"file_draw (name, row",
	}
	for _, into := range sections[:len(file.lines)] {
		if _, err := tx.Conn().PgConn().CopyFrom(ctx, file, "COPY "+into+") FROM STDIN"); err != nil {
			return fmt.Errorf("copy the events of %s: %w", path, err)
		}
	}
	return nil
}

func columnList(columns []string) string {
	quoted := make([]string, len(columns))
	for i, c := range columns {
		quoted[i] = pgx.Identifier{c}.Sanitize()
	}
	return strings.Join(quoted, ", ")
}
