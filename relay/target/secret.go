package target

import (
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
)

const (
	secretPrefix = "whsec_"
	// Bounds of Standard Webhooks, in bytes.
	secretMin, secretMax = 24, 64
	// secretsMax bounds the secrets that sign at the same time. Two are enough for a rotation.
	secretsMax = 4
)

// ErrSecret is returned for text that holds no usable secrets.
var ErrSecret = errors.New("want a line for each secret, the newest first, such as " +
	`printf 'whsec_%s\n' "$(openssl rand -base64 32)"`)

// ParseSecrets reads the secrets of a webhook, one a line: whsec_ and 24 to 64 bytes in base64. The newest comes first.
// Its errors do not repeat them.
func ParseSecrets(text string) (secrets [][]byte, err error) {
	for number, line := range strings.Split(strings.TrimSpace(text), "\n") {
		line = strings.TrimSpace(line)
		if line == "" {
			continue
		}
		encoded, found := strings.CutPrefix(line, secretPrefix)
		secret, err := base64.StdEncoding.DecodeString(encoded)
		if !found || err != nil || len(secret) < secretMin || len(secret) > secretMax {
			return nil, fmt.Errorf("line %d is not whsec_ and %d to %d bytes in base64: %w", number+1, secretMin, secretMax,
				ErrSecret)
		}
		secrets = append(secrets, secret)
	}
	if len(secrets) == 0 {
		return nil, fmt.Errorf("no secret: %w", ErrSecret)
	}
	if len(secrets) > secretsMax {
		return nil, fmt.Errorf("%d secrets, at most %d sign at the same time: %w", len(secrets), secretsMax, ErrSecret)
	}
	return secrets, nil
}
