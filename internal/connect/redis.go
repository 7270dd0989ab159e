package connect

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// Ingress: buyers wait for the answers, so time-outs are short and an overload is reported quickly.
const (
	ingressDial  = 500 * time.Millisecond
	ingressRead  = time.Second
	ingressQueue = time.Second // for a free connection
	// ingressRetries is safe because the scripts are idempotent. Three tries take up to 3 s, which a
	// buyer waits.
	ingressRetries = 2
	// ingressConnections: requests of a sale share one call, so this is the number of concurrently active sales.
	ingressConnections = 64
)

// Control: acks, locks and operators, for which waiting is better than failing.
const (
	controlDial        = 2 * time.Second
	controlRead        = 3 * time.Second
	controlQueue       = 5 * time.Second
	controlRetries     = 3
	controlConnections = 16
)

// MaxBlock bounds the BLOCK of a read on a Blocking client. With the time-out below, it bounds how long it
// takes to detect a vanished Redis.
const MaxBlock = 5 * time.Second

const (
	blockingDial = 2 * time.Second
	blockingRead = MaxBlock + 3*time.Second
	// blockingConnections: one per stream that a process reads, so as many as there can be partitions.
	// It is a limit: a worker with one partition opens one.
	blockingConnections = 64
)

// none disables an option of go-redis; 0 would be its default.
const none = -1

// Ingress returns a client for the purchase path.
func Ingress(redisURL string) (redis.UniversalClient, error) {
	return open(redisURL, "stampede-ingress", func(o *redis.Options) {
		o.DialTimeout, o.ReadTimeout, o.WriteTimeout = ingressDial, ingressRead, ingressRead
		o.PoolTimeout, o.PoolSize, o.MaxRetries = ingressQueue, ingressConnections, ingressRetries
	})
}

// Control returns a client for acks, locks and the work of operators.
func Control(redisURL string) (redis.UniversalClient, error) {
	return open(redisURL, "stampede-control", func(o *redis.Options) {
		o.DialTimeout, o.ReadTimeout, o.WriteTimeout = controlDial, controlRead, controlRead
		o.PoolTimeout, o.PoolSize, o.MaxRetries = controlQueue, controlConnections, controlRetries
	})
}

// Blocking returns a client for XREADGROUP BLOCK of at most MaxBlock. It never retries: the entries of a lost
// answer are on the consumer's pending list, and the reader needs the error to read them from there. With a cluster
// it follows redirections only, because the reader's commands forbid other retries.
func Blocking(redisURL string) (redis.UniversalClient, error) {
	return open(redisURL, "stampede-blocking", func(o *redis.Options) {
		o.DialTimeout, o.ReadTimeout, o.WriteTimeout = blockingDial, blockingRead, controlRead
		o.PoolTimeout, o.PoolSize, o.MaxRetries = controlQueue, blockingConnections, none
	})
}

// open returns a client for the server, the cluster or the master behind Sentinels that the URL names. It connects on
// first use.
func open(redisURL, name string, set func(*redis.Options)) (redis.UniversalClient, error) {
	routeLog()
	target, err := parseRedisURL(redisURL)
	if err != nil {
		return nil, err
	}
	o := target.single
	if o == nil {
		o = &redis.Options{DB: target.database}
		o.Username, o.Password = target.credentials()
	}
	o.ClientName = name
	// A call ends with its context.
	o.ContextTimeoutEnabled = true
	// The retries of commands are enough: by default go-redis dials five times in each of them.
	o.DialerRetries = 1
	// All connections belong to the pool whose size is set; pipelines would have ten more.
	o.PipelinePoolSize = none
	// RESP2 is enough for the answers of the scripts, and needs no check for push messages before each
	// answer. CLIENT SETINFO and CLIENT MAINT_NOTIFICATIONS are errors in Redis 7.0.
	o.Protocol = 2
	o.DisableIdentity = true
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	set(o)
	switch {
	case target.single != nil:
		return redis.NewClient(o), nil
	case target.masterName != "":
		return openSentinels(target, o), nil
	}
	return openCluster(target, o), nil
}

func openSentinels(target redisTarget, o *redis.Options) redis.UniversalClient {
	options := universal(target, o).Failover()
	options.MasterName = target.masterName
	options.SentinelUsername, options.SentinelPassword = target.sentinelUsername, target.sentinelPassword
	client := redis.NewFailoverClient(options)
	// It dials the address that the Sentinels tell. The name is for metrics and messages, which would call every master
	// FailoverClient.
	client.Options().Addr = target.masterName
	return client
}

// universal returns the options that are the same for Sentinel and for a cluster.
func universal(target redisTarget, o *redis.Options) *redis.UniversalOptions {
	u := &redis.UniversalOptions{
		Addrs: target.addrs, DB: o.DB, Username: o.Username, Password: o.Password, ClientName: o.ClientName,
		DialTimeout: o.DialTimeout, ReadTimeout: o.ReadTimeout, WriteTimeout: o.WriteTimeout,
		PoolTimeout: o.PoolTimeout, PoolSize: o.PoolSize, MaxRetries: o.MaxRetries,
		ContextTimeoutEnabled: o.ContextTimeoutEnabled, DialerRetries: o.DialerRetries,
		PipelinePoolSize: o.PipelinePoolSize, Protocol: o.Protocol, DisableIdentity: o.DisableIdentity,
		MaintNotificationsConfig: o.MaintNotificationsConfig,
	}
	if target.tls {
		u.Dialer = tlsDialer(target.addrs, o.DialTimeout)
	}
	return u
}

// routeLog sends the log of go-redis to slog, at level debug: callers get the same failures as errors.
var routeLog = sync.OnceFunc(func() { redis.SetLogger(debugLogger{}) })

type debugLogger struct{}

// Printf implements go-redis's logger.
func (debugLogger) Printf(ctx context.Context, format string, v ...any) {
	if l := slog.Default(); l.Enabled(ctx, slog.LevelDebug) {
		l.DebugContext(ctx, "go-redis: "+fmt.Sprintf(format, v...))
	}
}

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

const (
	// topologyEvery is how often a client in use asks a cluster for its masters. go-redis does not ask when a master
	// refuses connections, so this bounds how long it takes to find the replica that replaced one.
	topologyEvery = 500 * time.Millisecond
	// topologyTimeout bounds the question to one node; another one is asked then.
	topologyTimeout = 500 * time.Millisecond
	// redirectsMax bounds the redirections of a command: its slot has moved, or is moving.
	redirectsMax = 2
)

func openCluster(target redisTarget, o *redis.Options) redis.UniversalClient {
	options := universal(target, o).Cluster()
	// A redirection counts as a retry.
	options.MaxRedirects = max(0, o.MaxRetries) + redirectsMax
	options.MaxRetries = none
	options.ClusterStateReloadInterval = topologyEvery
	// With them, clients ask for the table of COMMAND before everything, which an ACL may forbid.
	options.DisableRoutingPolicies = true
	nodes := &clusterNodes{former: make(map[string]struct{}), open: make(map[string]map[net.Conn]struct{})}
	options.NewClient = nodes.newClient
	return redis.NewClusterClient(options)
}

// clusterNodes closes the connections to a node that was a master and is none any more, and sends it no further
// commands. So calls that wait for a frozen master end when it is replaced.
type clusterNodes struct {
	mu      sync.Mutex
	masters map[string]struct{}
	former  map[string]struct{}              // those that are no masters any more
	open    map[string]map[net.Conn]struct{} // by address
}

func (n *clusterNodes) newClient(o *redis.Options) *redis.Client {
	dial := o.Dialer
	if dial == nil {
		dial = redis.NewDialer(o)
	}
	addr := o.Addr
	o.Dialer = func(ctx context.Context, network, to string) (net.Conn, error) {
		conn, err := dial(ctx, network, to)
		if err != nil {
			return nil, err
		}
		return n.track(addr, conn), nil
	}
	client := redis.NewClient(o)
	client.AddHook(nodeHook{n, addr})
	return client
}

// nodeConn is a connection in clusterNodes.open.
type nodeConn struct {
	net.Conn
	nodes *clusterNodes
	addr  string
}

func (c *nodeConn) Close() error {
	c.nodes.mu.Lock()
	delete(c.nodes.open[c.addr], c.Conn)
	c.nodes.mu.Unlock()
	return c.Conn.Close()
}

// plainNodeConn lets go-redis see whether the server has closed an idle connection. With TLS it must not look.
type plainNodeConn struct {
	*nodeConn
	syscall.Conn
}

func (n *clusterNodes) track(addr string, conn net.Conn) net.Conn {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.open[addr] == nil {
		n.open[addr] = make(map[net.Conn]struct{})
	}
	n.open[addr][conn] = struct{}{}
	tracked := &nodeConn{conn, n, addr}
	if plain, ok := conn.(syscall.Conn); ok {
		return plainNodeConn{tracked, plain}
	}
	return tracked
}

// know takes the masters of the cluster.
func (n *clusterNodes) know(slots []redis.ClusterSlot) {
	masters := make(map[string]struct{}, len(slots))
	for _, slot := range slots {
		if len(slot.Nodes) > 0 {
			masters[slot.Nodes[0].Addr] = struct{}{}
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for addr := range n.masters {
		if _, still := masters[addr]; !still {
			n.former[addr] = struct{}{}
			for conn := range n.open[addr] {
				_ = conn.Close() // its users get an error, and close it as well
			}
		}
	}
	for addr := range masters {
		delete(n.former, addr)
	}
	n.masters = masters
}

func (n *clusterNodes) isFormer(addr string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	_, former := n.former[addr]
	return former
}

// nodeHook is the hook of the client of one node.
type nodeHook struct {
	nodes *clusterNodes
	addr  string
}

// ProcessHook implements redis.Hook.
func (h nodeHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		slots, ok := cmd.(*redis.ClusterSlotsCmd)
		if !ok {
			if h.nodes.isFormer(h.addr) {
				return redis.ErrClosed // the client of the cluster takes another node
			}
			return next(ctx, cmd)
		}
		ctx, cancel := context.WithTimeout(ctx, topologyTimeout)
		defer cancel()
		err := next(ctx, cmd)
		if err == nil {
			h.nodes.know(slots.Val())
		}
		return err
	}
}

// DialHook implements redis.Hook.
func (nodeHook) DialHook(next redis.DialHook) redis.DialHook { return next }

// ProcessPipelineHook implements redis.Hook.
func (h nodeHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if !h.nodes.isFormer(h.addr) {
			return next(ctx, cmds)
		}
		for _, cmd := range cmds {
			cmd.SetErr(redis.ErrClosed)
		}
		return redis.ErrClosed
	}
}
