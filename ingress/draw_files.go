package ingress

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/ledger/draws"
)

const (
	// downloadsMax bounds the files at a time, which hold a buffer each, and addressDownloads those of an address where
	// streams are bounded. directMax bounds those that are read from Postgres, because they are not on disk.
	downloadsMax     = 1000
	addressDownloads = 2
	directMax        = 8
	// downloadRate is how many bytes a second a client has to read of a file from downloadGrace on, or is cut off.
	downloadRate  = 256 << 10
	downloadGrace = 30 * time.Second
	// rangesMax bounds the parts of an answer. Who asks for more gets the whole.
	rangesMax = 4
	// bundleMaxAge is after what time a bundle is made again, and bundleCost how many times as long as that takes that is
	// for a long one.
	bundleMaxAge = time.Second
	bundleCost   = 10
	// filesMax bounds the bytes on disk, and fillTimeout the time to write a file there. diskRetry is how long files are
	// read from Postgres after one could not be written.
	filesMax    = 2 << 30
	fillTimeout = 5 * time.Minute
	diskRetry   = time.Minute
)

// download wraps a handler that sends a file.
func (s *drawService) download(h echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		release, err := s.limits.openStream(&s.limits.downloads, c.Request(), "")
		if err != nil {
			return err
		}
		defer release()
		if strings.Count(c.Request().Header.Get("Range"), ",") >= rangesMax {
			c.Request().Header.Del("Range")
		}
		return h(c)
	}
}

// bundle serves GET /v1/sales/{sale}/draw/bundle.
func (s *drawService) bundle(c echo.Context) error {
	d, err := s.frozen(c)
	if err != nil {
		return err
	}
	name := "bundle of " + d.SaleID.String()
	file := s.files.open(name)
	if file == nil {
		var body []byte
		err := s.inLine(c, s.strangers, func(ctx context.Context) error {
			if file = s.files.open(name); file != nil {
				return nil // made meanwhile
			}
			began := time.Now()
			b, err := s.config.Draws.Bundle(ctx, d.SaleID)
			if err != nil {
				return err
			}
			if body, err = marshalLine(b); err == nil {
				age := max(bundleMaxAge, bundleCost*time.Since(began))
				file = s.files.add(name, int64(len(body)), age, func(_ context.Context, w io.Writer) error {
					_, err := w.Write(body)
					return err
				})
			}
			return err
		})
		if err != nil {
			return err
		}
		if file == nil {
			return s.direct.withSlot(func() error { return sendWhole(c, bytes.NewReader(body)) })
		}
	}
	defer file.close()
	return sendWhole(c, file.reader())
}

// leaves serves GET /v1/sales/{sale}/draw/leaves.
func (s *drawService) leaves(c echo.Context) error {
	d, err := s.frozen(c)
	if err != nil {
		return err
	}
	file := s.files.ensure(fmt.Sprintf("leaves of %s %x", d.SaleID, d.Root), d.ListBytes(),
		func(ctx context.Context, w io.Writer) error { return s.config.Draws.Leaves(ctx, d.SaleID, w) })
	if file != nil {
		defer file.close()
		return sendList(c, d, file.reader())
	}
	return s.direct.withSlot(func() error {
		var list *draws.FrozenList
		err := s.inLine(c, s.strangers, func(context.Context) (err error) {
			list, err = s.config.Draws.FrozenList(c.Request().Context(), d.SaleID) // it is read after the query
			return err
		})
		if err != nil {
			return err
		}
		return sendList(c, d, list)
	})
}

// sendWhole sends a bundle, which may be another one the next time: it has no parts.
func sendWhole(c echo.Context, file interface {
	io.Reader
	Size() int64
},
) error {
	h := c.Response().Header()
	h["Content-Type"], h["Content-Length"] = jsonContent, []string{strconv.FormatInt(file.Size(), 10)}
	_, _ = io.Copy(newFileWriter(c), file) // an error means that the client has left
	return nil
}

// sendList sends a list, or a part of it. It never changes, and may be long: caches keep it, by its root, and a
// download that broke off goes on. An answer that breaks off is shorter than its Content-Length, and ends the
// connection.
func sendList(c echo.Context, d *draws.Draw, list io.ReadSeeker) error {
	etag := `"` + base64.RawURLEncoding.EncodeToString(d.Root) + `"`
	if isKnown, err := checkTag(c, publicForever, etag); err != nil || isKnown {
		return err
	}
	c.Response().Header()["Content-Type"] = []string{"application/octet-stream"}
	http.ServeContent(newFileWriter(c), c.Request(), "", time.Time{}, list)
	return nil
}

func newFileWriter(c echo.Context) *fileWriter {
	return &fileWriter{ResponseWriter: c.Response(), began: time.Now()}
}

// fileWriter sends a file to a client that reads downloadRate.
type fileWriter struct {
	http.ResponseWriter
	began   time.Time
	written int64
}

func (w *fileWriter) Write(part []byte) (int, error) {
	w.written += int64(len(part))
	due := w.began.Add(downloadGrace + time.Duration(w.written)*time.Second/downloadRate)
	// Replaces the server's accept.WriteTimeout. It fails if the connection has no deadlines.
	_ = http.NewResponseController(w.ResponseWriter).SetWriteDeadline(due)
	return w.ResponseWriter.Write(part)
}

// files are the files of draws that were asked for, on disk, so that each is read from Postgres once, by
// however many readers, however slow, and in any parts. They have no names there: they are gone with the process.
type files struct {
	*core

	mu       sync.Mutex
	byName   map[string]*file
	bytes    int64
	failedAt time.Time
	// filling has the turn of the one that is written.
	filling chan struct{}
}

// file is a file that is read while it is written.
type file struct {
	of    *files
	name  string
	size  int64
	until time.Time // from then on it is made again
	disk  *os.File

	mu      sync.Mutex
	grown   sync.Cond
	written int64
	failure error

	// readers count those that read or write it, and usedAt is when the last one came. Both are under the mutex of all.
	readers int
	usedAt  time.Time
}

func newFiles(c *core) *files {
	return &files{core: c, byName: map[string]*file{}, filling: make(chan struct{}, 1)}
}

// open returns the file with the name, which its reader closes, or nil.
func (f *files) open(name string) *file {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.find(name)
}

// find is open, under mu.
func (f *files) find(name string) *file {
	found := f.byName[name]
	if found == nil || time.Now().After(found.until) {
		return nil
	}
	found.readers++
	found.usedAt = time.Now()
	return found
}

// forever is longer than a process runs.
const forever = 100 * 365 * 24 * time.Hour

// ensure is open, and add if there is no such file.
func (f *files) ensure(name string, size int64, fill func(context.Context, io.Writer) error) *file {
	if found := f.open(name); found != nil {
		return found
	}
	return f.add(name, size, forever, fill)
}

// add has a file written, which is as good as new for so long. It is nil if the disk cannot take it now.
func (f *files) add(name string, size int64, age time.Duration, fill func(context.Context, io.Writer) error) *file {
	f.mu.Lock()
	defer f.mu.Unlock()
	if found := f.find(name); found != nil {
		return found
	}
	f.makeRoom(size, name)
	if f.bytes+size > filesMax || time.Since(f.failedAt) < diskRetry {
		return nil
	}
	disk, err := os.CreateTemp("", "stampede-draw-")
	if err == nil {
		err = os.Remove(disk.Name())
	}
	if err != nil {
		f.fail(err)
		return nil
	}
	now := time.Now()
	added := &file{of: f, name: name, size: size, until: now.Add(age), disk: disk, readers: 2, usedAt: now}
	added.grown.L = &added.mu
	f.byName[name] = added
	f.bytes += size
	f.background.start(func(ctx context.Context) { added.fill(ctx, fill) })
	return added
}

// makeRoom drops the older file of the name, and as many that nobody reads, the one first that was asked for least
// lately, as it takes.
func (f *files) makeRoom(size int64, name string) {
	f.drop(f.byName[name])
	for f.bytes+size > filesMax {
		var oldest *file
		for _, one := range f.byName {
			if one.readers == 0 && (oldest == nil || one.usedAt.Before(oldest.usedAt)) {
				oldest = one
			}
		}
		if oldest == nil {
			return
		}
		f.drop(oldest)
	}
}

// drop forgets a file. It is closed when nobody reads it.
func (f *files) drop(one *file) {
	if one == nil || f.byName[one.name] != one {
		return
	}
	delete(f.byName, one.name)
	if one.readers == 0 {
		one.free()
	}
}

func (f *files) fail(err error) {
	f.failedAt = time.Now()
	f.log.Warn("files of draws are read from Postgres for each download: they cannot be kept in the folder for "+
		"temporary files", "error", err)
}

// free closes a file that nobody can find. The mutex of all is held.
func (f *file) free() {
	f.of.bytes -= f.size
	_ = f.disk.Close()
}

func (f *file) close() {
	f.of.mu.Lock()
	defer f.of.mu.Unlock()
	if f.readers--; f.readers == 0 && f.of.byName[f.name] != f {
		f.free()
	}
}

var errFileChanged = errors.New("the file has another length")

// fill writes the file, one at a time.
func (f *file) fill(ctx context.Context, fill func(context.Context, io.Writer) error) {
	defer f.close()
	ctx, cancel := context.WithTimeout(ctx, fillTimeout)
	defer cancel()
	var err error
	select {
	case f.of.filling <- struct{}{}:
		err = fill(ctx, f)
		<-f.of.filling
	case <-ctx.Done():
		err = ctx.Err()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if err == nil && f.written != f.size {
		err = errFileChanged
	}
	f.failure = err
	f.grown.Broadcast()
	if err != nil {
		f.of.mu.Lock()
		defer f.of.mu.Unlock()
		f.of.drop(f)
		if path := (*os.PathError)(nil); errors.As(err, &path) {
			f.of.fail(err)
		}
	}
}

// Write appends to the file.
func (f *file) Write(part []byte) (int, error) {
	n, err := f.disk.Write(part)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.written += int64(n)
	f.grown.Broadcast()
	return n, err
}

func (f *file) reader() *io.SectionReader { return io.NewSectionReader(f, 0, f.size) }

// ReadAt waits until the bytes are written, or will not be.
func (f *file) ReadAt(to []byte, at int64) (int, error) {
	until := min(at+int64(len(to)), f.size)
	f.mu.Lock()
	for f.written < until && f.failure == nil {
		f.grown.Wait()
	}
	failure := f.failure
	f.mu.Unlock()
	if failure != nil {
		return 0, fmt.Errorf("%w: %w", io.ErrUnexpectedEOF, failure)
	}
	return f.disk.ReadAt(to, at)
}

// frozen returns the frozen draw in the path of a request, from memory.
func (s *drawService) frozen(c echo.Context) (*draws.Draw, error) {
	d, err := s.known(c)
	switch {
	case err != nil:
		return nil, err
	case !d.FrozenAt.IsZero():
		return d, nil
	case d.State == draws.Void:
		return nil, problemDrawVoid
	}
	return nil, problemDrawNotFrozen
}

// known returns the draw in the path of a request, from memory: what strangers ask in vain costs Postgres nothing.
func (s *drawService) known(c echo.Context) (*draws.Draw, error) {
	goods, ok := parseID(c.Param("sale"))
	if !ok {
		return nil, problemDrawNotFound
	}
	ctx, cancel := context.WithTimeout(c.Request().Context(), catalogTimeout)
	defer cancel()
	current, err := s.feed.get(ctx, goods)
	switch {
	case err != nil:
		return nil, err
	case current.draw == nil:
		return nil, problemDrawNotFound
	}
	return current.draw, nil
}

// findDraws is the query of the feed.
func (s *drawService) findDraws(ctx context.Context, sales []uuid.UUID) (map[uuid.UUID]found, error) {
	known, err := s.config.Draws.FindAll(ctx, sales)
	if err != nil {
		return nil, err
	}
	all := make(map[uuid.UUID]found, len(sales))
	for _, goods := range sales {
		all[goods] = found{}
	}
	for i := range known {
		if d := &known[i]; d.Kind == draws.ByHash {
			all[d.SaleID] = found{draw: d}
		}
	}
	return all, nil
}
