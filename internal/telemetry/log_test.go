package telemetry

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestLoggerWritesFormatAndLevel(t *testing.T) {
	var out bytes.Buffer
	log, err := NewLogger(&out, formatText, "WARN")
	require.NoError(t, err)
	log.Info("hidden")
	log.Warn("shown", "order", 7)
	assert.NotContains(t, out.String(), "hidden")
	assert.Contains(t, out.String(), "level=WARN msg=shown order=7\n")

	out.Reset()
	log, err = NewLogger(&out, formatJSON, "debug")
	require.NoError(t, err)
	log.Debug("shown", "order", 7)
	var record map[string]any
	require.NoError(t, json.Unmarshal(out.Bytes(), &record))
	assert.Equal(t, "shown", record["msg"])
	assert.EqualValues(t, 7, record["order"])
}

func TestNewLoggerRejectsUnknownFormatAndLevel(t *testing.T) {
	_, err := NewLogger(nil, "xml", "info")
	assert.EqualError(t, err, `log format "xml": want text or json`)
	_, err = NewLogger(nil, formatText, "loud")
	assert.EqualError(t, err, `log level "loud": want debug, info, warn or error`)
}

// traced is an error with a stack, as in some libraries.
type traced struct{}

func (traced) Error() string { return "i/o timeout" }

func (traced) Format(f fmt.State, verb rune) {
	_, _ = io.WriteString(f, "i/o timeout")
	if verb == 'v' && f.Flag('+') {
		_, _ = io.WriteString(f, "\nmain.publish\n\t/src/main.go:7")
	}
}

func TestLoggerWritesOnlyMessageOfError(t *testing.T) {
	for _, format := range []string{formatText, formatJSON} {
		var out bytes.Buffer
		log, err := NewLogger(&out, format, "info")
		require.NoError(t, err)
		log.Error("failed", "error", traced{}, slog.Group("of", "cause", fmt.Errorf("publish: %w", error(traced{}))))
		assert.Contains(t, out.String(), "i/o timeout")
		assert.NotContains(t, out.String(), "main.go", "no stack")
		assert.Equal(t, 1, strings.Count(out.String(), "\n"))
	}
}
