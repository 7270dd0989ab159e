package target

import (
	"encoding/base64"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// Kind is how events are sent to a target.
type Kind string

// The kinds of targets.
const (
	Webhook     Kind = "webhook"
	RedisStream Kind = "redis-stream"
	Kafka       Kind = "kafka"
	Stdout      Kind = "stdout"
)

const urlMax = 2000

// ErrURL is returned for what cannot be the address of a target.
var ErrURL = errors.New("want https://host/path, redis-stream://host:6379/0?stream=NAME, " +
	"kafka://host:9092,host:9092/TOPIC or stdout")

// Address is the parsed URL of a target.
type Address struct {
	Kind Kind
	// URL is the address of a webhook, or of Redis as redis:// or rediss://.
	URL string
	// Stream is the key of a stream in Redis. MaxLen is about how many of the newest entries it keeps; 0 for all.
	Stream string
	MaxLen int64
	// Brokers are Kafka's addresses of the first contact.
	Brokers []string
	Topic   string

	text string
}

// String returns the URL as it was given, with its password.
func (a *Address) String() string { return a.text }

// ParseAddress reads the URL of a target. Its errors do not repeat the URL, which may hold a password.
func ParseAddress(text string) (*Address, error) {
	a := &Address{text: text}
	scheme, rest, _ := strings.Cut(text, "://")
	var err error
	switch {
	case len(text) > urlMax:
		err = fmt.Errorf("it is longer than %d bytes", urlMax)
	case strings.ContainsFunc(text, func(r rune) bool { return r <= ' ' || r > '~' }):
		err = errors.New("it holds other characters than visible ASCII")
	case text == "stdout" || text == "stdout:":
		a.Kind, a.text = Stdout, "stdout"
	case scheme == "https" || scheme == "http":
		a.Kind, a.URL = Webhook, text
		err = checkWebhook(text)
	case scheme == "redis-stream" || scheme == "rediss-stream":
		a.Kind = RedisStream
		err = a.parseRedis(strings.TrimSuffix(scheme, "-stream"), rest)
	case scheme == "kafka":
		a.Kind = Kafka
		err = a.parseKafka(rest)
	default:
		return nil, fmt.Errorf("the URL of the target: %w", ErrURL)
	}
	if err != nil {
		return nil, fmt.Errorf("the URL of the target: %w; %w", err, ErrURL)
	}
	return a, nil
}

func checkWebhook(text string) error {
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return errors.New("it is malformed")
	case u.Hostname() == "":
		return errors.New("it has no host")
	case u.Fragment != "":
		return errors.New("it has a fragment, which is never sent")
	}
	return nil
}

func (a *Address) parseRedis(scheme, rest string) error {
	u, err := url.Parse(scheme + "://" + rest)
	if err != nil {
		return errors.New("it is malformed")
	}
	query := u.Query()
	a.Stream = query.Get("stream")
	if a.Stream == "" {
		return errors.New("it names no stream")
	}
	if text := query.Get("maxlen"); text != "" {
		if a.MaxLen, err = strconv.ParseInt(text, 10, 64); err != nil || a.MaxLen < 1 {
			return errors.New("maxlen is not a whole number from 1")
		}
	}
	for name := range query {
		if name != "stream" && name != "maxlen" {
			return errors.New("it has other parameters than stream and maxlen")
		}
	}
	u.RawQuery = ""
	a.URL = u.String()
	return nil
}

// parseKafka splits the list itself: several hosts are no host of a URL.
func (a *Address) parseKafka(rest string) error {
	brokers, topic, _ := strings.Cut(rest, "/")
	a.Brokers, a.Topic = strings.Split(brokers, ","), topic
	switch {
	case strings.Contains(brokers, "@"):
		return errors.New("users of Kafka are not supported")
	case slices.Contains(a.Brokers, ""):
		return errors.New("a broker is missing")
	case topic == "" || strings.ContainsAny(topic, "/?#"):
		return errors.New("it names no topic")
	}
	return nil
}

// Redacted is a URL without what may be secret: user, password and parameters.
func Redacted(text string) string {
	scheme, rest, found := strings.Cut(text, "://")
	if !found {
		return text
	}
	rest, _, _ = strings.Cut(rest, "#")
	rest, query, _ := strings.Cut(rest, "?")
	host, path, _ := strings.Cut(rest, "/")
	if i := strings.LastIndex(host, "@"); i >= 0 {
		host = host[i+1:]
	}
	shown := scheme + "://" + host
	if path != "" {
		shown += "/" + path
	}
	if !strings.HasSuffix(scheme, "-stream") {
		if query != "" {
			shown += "?…"
		}
		return shown
	}
	if query != "" {
		shown += "?" + query
	}
	return shown
}

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
