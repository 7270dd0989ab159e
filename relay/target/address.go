package target

import (
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

// parseKafka splits the list by hand: several hosts are no host of a URL.
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
