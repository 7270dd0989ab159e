package deadletter

import (
	"encoding/json"
	"fmt"
	"strings"
	"unicode/utf8"

	"stampede/stream"
)

// The fields of a dead letter are stored as JSON, [[name, value], …] in the order of the entry: readable in psql, and
// lossless. A name is a plain string, a value is {"text": …}. Either is {"base64": …} if it is not UTF-8 or has a zero
// byte, which JSON or Postgres cannot hold.

type storedValue struct {
	Text   *string `json:"text,omitempty"`
	Base64 []byte  `json:"base64,omitempty"`
}

func storedOf(s string) storedValue {
	if isText(s) {
		return storedValue{Text: &s}
	}
	return storedValue{Base64: []byte(s)}
}

func (v storedValue) string() string {
	if v.Text != nil {
		return *v.Text
	}
	return string(v.Base64)
}

func isText(s string) bool { return utf8.ValidString(s) && !strings.ContainsRune(s, 0) }

func encodeFields(fields []stream.Field) ([]byte, error) {
	stored := make([][2]any, len(fields))
	for i, f := range fields {
		stored[i] = [2]any{f.Name, storedOf(f.Value)}
		if !isText(f.Name) {
			stored[i][0] = storedOf(f.Name)
		}
	}
	return json.Marshal(stored)
}

func decodeFields(data []byte) ([]stream.Field, error) {
	var stored [][2]json.RawMessage
	if err := json.Unmarshal(data, &stored); err != nil {
		return nil, fmt.Errorf("fields: %w", err)
	}
	fields := make([]stream.Field, len(stored))
	for i, pair := range stored {
		var value storedValue
		if err := json.Unmarshal(pair[1], &value); err != nil {
			return nil, fmt.Errorf("value of field %d: %w", i, err)
		}
		fields[i].Value = value.string()
		if err := json.Unmarshal(pair[0], &fields[i].Name); err == nil {
			continue
		}
		var name storedValue
		if err := json.Unmarshal(pair[0], &name); err != nil {
			return nil, fmt.Errorf("name of field %d: %w", i, err)
		}
		fields[i].Name = name.string()
	}
	return fields, nil
}
