package connect

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// ErrRedisURL is wrapped for a REDIS_URL that names no server. It contains nothing of the URL, because URLs contain
// passwords.
var ErrRedisURL = errors.New("REDIS_URL must look like redis://user:password@host:6379/0 (unix:///path for a socket), " +
	"redis+cluster://user:password@host-a:6379,host-b:6379 or " +
	"redis+sentinel://user:password@host-a:26379,host-b:26379/master-name/0; rediss for TLS; special characters " +
	"percent-encoded")

func badRedisURL(why string) error { return fmt.Errorf("%w: %s", ErrRedisURL, why) }

const (
	redisPort    = "6379"
	sentinelPort = "26379"
)

// redisTarget is what a REDIS_URL names.
type redisTarget struct {
	// single is set for one server. Then the other fields are empty.
	single *redis.Options

	tls   bool
	addrs []string
	user  *url.Userinfo // nil without

	// masterName is set for Sentinel only, as are the fields below.
	masterName                         string
	database                           int
	sentinelUsername, sentinelPassword string
}

// parseRedisURL parses the forms of ErrRedisURL. A single server may have the parameters of redis.ParseURL, Sentinels
// have sentinel_username and sentinel_password if they need any.
func parseRedisURL(text string) (redisTarget, error) {
	scheme, rest, found := strings.Cut(text, "://")
	if !found {
		return redisTarget{}, ErrRedisURL
	}
	switch scheme {
	case "redis", "rediss", "unix":
		single, err := redis.ParseURL(text)
		if err != nil {
			return redisTarget{}, ErrRedisURL
		}
		return redisTarget{single: single}, nil
	case "redis+cluster", "rediss+cluster":
		return parseCluster(rest, scheme == "rediss+cluster")
	case "redis+sentinel", "rediss+sentinel":
		return parseSentinels(rest, scheme == "rediss+sentinel")
	}
	return redisTarget{}, ErrRedisURL
}

func parseCluster(rest string, withTLS bool) (redisTarget, error) {
	t, u, err := parseHosts(rest, redisPort)
	if err != nil {
		return redisTarget{}, err
	}
	t.tls = withTLS
	switch {
	case strings.Trim(u.Path, "/") != "" && u.Path != "/0":
		return redisTarget{}, badRedisURL("a cluster has database 0 only, so nothing follows its addresses")
	case u.RawQuery != "":
		return redisTarget{}, badRedisURL("a cluster has no parameters")
	}
	return t, nil
}

func parseSentinels(rest string, withTLS bool) (redisTarget, error) {
	t, u, err := parseHosts(rest, sentinelPort)
	if err != nil {
		return redisTarget{}, err
	}
	t.tls = withTLS
	var number string
	t.masterName, number, _ = strings.Cut(strings.TrimPrefix(u.Path, "/"), "/")
	if t.masterName == "" {
		return redisTarget{}, badRedisURL("the name under which the Sentinels watch the master must follow their " +
			"addresses, as in /mymaster/0")
	}
	if number != "" {
		if t.database, err = strconv.Atoi(number); err != nil || t.database < 0 {
			return redisTarget{}, badRedisURL("the last part must be the number of the database")
		}
	}
	parameters, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return redisTarget{}, ErrRedisURL
	}
	for name := range parameters {
		if !slices.Contains([]string{"sentinel_username", "sentinel_password"}, name) {
			return redisTarget{}, badRedisURL("its parameters can be sentinel_username and sentinel_password")
		}
	}
	t.sentinelUsername, t.sentinelPassword = parameters.Get("sentinel_username"), parameters.Get("sentinel_password")
	return t, nil
}

// parseHosts parses what follows the scheme: "user:password@host-a:1,host-b:2/path?query". Package url takes one host
// only, so it gets the rest without them.
func parseHosts(rest, defaultPort string) (t redisTarget, u *url.URL, err error) {
	authority, path := rest, ""
	if i := strings.IndexAny(rest, "/?#"); i >= 0 {
		authority, path = rest[:i], rest[i:]
	}
	hosts, user := authority, ""
	if i := strings.LastIndex(authority, "@"); i >= 0 {
		user, hosts = authority[:i+1], authority[i+1:]
	}
	if u, err = url.Parse("redis://" + user + "host" + path); err != nil || u.Fragment != "" {
		return redisTarget{}, nil, ErrRedisURL
	}
	t.user = u.User
	for addr := range strings.SplitSeq(hosts, ",") {
		host, port, err := net.SplitHostPort(addr)
		if err != nil {
			host, port, err = net.SplitHostPort(addr + ":" + defaultPort)
		}
		if n, portErr := strconv.ParseUint(port, 10, 16); err != nil || portErr != nil || n == 0 || host == "" {
			return redisTarget{}, nil, badRedisURL("its addresses must be host:port, separated by commas")
		}
		t.addrs = append(t.addrs, net.JoinHostPort(host, port))
	}
	return t, u, nil
}

// credentials of the Redis servers.
func (t redisTarget) credentials() (username, password string) {
	password, _ = t.user.Password()
	return t.user.Username(), password
}

// tlsDialer returns a dialer for servers that name each other. A server needs a certificate for the host under which
// it was named, or for one of the hosts in the URL: clusters may name their nodes by addresses that no certificate has.
func tlsDialer(
	urlAddrs []string, timeout time.Duration,
) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		hosts := make([]string, 0, 1+len(urlAddrs))
		for _, a := range append([]string{addr}, urlAddrs...) {
			host, _, err := net.SplitHostPort(a)
			if err != nil {
				return nil, err
			}
			hosts = append(hosts, host)
		}
		dialer := tls.Dialer{NetDialer: &net.Dialer{Timeout: timeout}, Config: &tls.Config{
			MinVersion: tls.VersionTLS12, ServerName: hosts[0],
			// VerifyConnection replaces the verification, which takes one name only.
			InsecureSkipVerify: true, //nolint:gosec // see above
			VerifyConnection:   func(state tls.ConnectionState) error { return verifyAnyHost(state, hosts) },
		}}
		return dialer.DialContext(ctx, network, addr)
	}
}

// verifyAnyHost returns nil if the server has a trusted certificate for one of the hosts, which are not empty.
func verifyAnyHost(state tls.ConnectionState, hosts []string) (err error) {
	intermediates := x509.NewCertPool()
	for _, certificate := range state.PeerCertificates[1:] {
		intermediates.AddCert(certificate)
	}
	for _, host := range hosts {
		_, err = state.PeerCertificates[0].Verify(x509.VerifyOptions{DNSName: host, Intermediates: intermediates})
		if err == nil {
			return nil
		}
	}
	return err
}
