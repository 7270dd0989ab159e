package stream

import (
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/stretchr/testify/require"
)

const ownMetadata = "\x82\xa5event\xadOrderReserved\xadevent_version\xa11"

func TestPlainMetadataIsParsedWithoutDecoder(t *testing.T) {
	t.Parallel()
	msg := plainMessage(map[string]any{FieldUUID: "id", FieldPayload: "{}", FieldMetadata: ownMetadata})
	require.NotNil(t, msg)
	require.Equal(t, map[string]string{"event": "OrderReserved", "event_version": "1"}, map[string]string(msg.Metadata))
}

// FuzzPlainMessage compares plainMessage with watermill-redisstream for every entry that it decodes.
//
//	go test -run '^$' -fuzz PlainMessage -fuzztime 30s ./fulfillment/stream
func FuzzPlainMessage(f *testing.F) {
	for _, metadata := range []string{
		ownMetadata, "", "\x80", "\x81\xa1a", "\x82\xa1a\xa1b\xa1a\xa1c", "\x81\xa1a\x01", "\xc0", "\x81\xd9\x01a\xa1b",
		"\xde\x00\x01\xa1a\xa1b",
		ownMetadata + "x", ownMetadata[:20], "\x90", "\x81\xa1\xff\xa1b", "\x81\xa1a\xbf" + strings.Repeat("b", 31),
		"\x81\xa1a\xc0",
	} {
		f.Add("id", metadata, "{}")
	}
	f.Fuzz(func(t *testing.T, id, metadata, payload string) {
		values := map[string]any{FieldUUID: id, FieldPayload: payload, FieldMetadata: metadata}
		msg := plainMessage(values)
		if msg == nil {
			return
		}
		want, err := redisstream.DefaultMarshallerUnmarshaller{}.Unmarshal(values)
		require.NoError(t, err)
		require.True(t, msg.Equals(want), "%q and %q", msg.Metadata, want.Metadata)
		require.Equal(t, want.UUID, msg.UUID)
	})
}
