package archive

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"time"

	"github.com/google/uuid"
)

// A file is compressed by gzip. Its text is a line with the Header in JSON, the events of the orders in the text format
// of COPY, one in each line, a line "\.", the events of the payments likewise, and a line with the Trailer. No event
// can be the line "\.".

const (
	// formatName and a version are in the header of every file. A reader refuses other ones.
	formatName = "stampede-sale-archive"
	// versionWithItems is the version of the file of a sale with items, so that a program that does not know them refuses
	// it. Other files have version 1.
	versionWithItems = 2

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
}

// Trailer is the end of a file. SHA256 is that of the text before it.
type Trailer struct {
	Figures
	SHA256 string `json:"sha256"`
}

// writeFile writes a file. The events of orders and of payments are written by sections.
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

// archiveFile is an archive that is read. Read returns the events in the text format of COPY: those of the orders until
// io.EOF, then those of the payments.
type archiveFile struct {
	Header
	// Trailer is set when Read has returned io.EOF twice: then the whole file was compared with it.
	Trailer

	file   *os.File
	packed *gzip.Reader
	text   *bufio.Reader
	sum    hash.Hash
	line   []byte // the rest of the line to return
	events [2]int64
	read   int // how many of the sections
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
	if f.Header.Version < 1 || f.Header.Version > versionWithItems {
		return fmt.Errorf("the file has version %d of the format, and this program reads versions 1 to %d", f.Header.Version,
			versionWithItems)
	}
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

// next reads the next event, or the end.
func (f *archiveFile) next() error {
	if f.read == len(f.events) {
		return io.EOF
	}
	line, err := f.readLine(lineMax)
	if err != nil {
		return err
	}
	_, _ = f.sum.Write(line)
	if string(line) != endOfEvents {
		f.line = line
		f.events[f.read]++
		return nil
	}
	if f.read++; f.read < len(f.events) {
		return io.EOF
	}
	if line, err = f.readLine(lineMax); err != nil {
		return err
	}
	if err := json.Unmarshal(line, &f.Trailer); err != nil {
		return damaged(err)
	}
	if sum := hex.EncodeToString(f.sum.Sum(nil)); sum != f.SHA256 || f.events != [2]int64{f.Events, f.PaymentEvents} {
		return fmt.Errorf("%w: it has %d events with the checksum %s, and should have %d and %d with %s", ErrDamagedFile,
			f.events, sum, f.Events, f.PaymentEvents, f.SHA256)
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
	for range f.events {
		if _, err := io.Copy(io.Discard, f); err != nil {
			return Header{}, Trailer{}, fmt.Errorf("%s: %w", path, err)
		}
	}
	return f.Header, f.Trailer, nil
}
