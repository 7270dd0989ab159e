package connect

import (
	"context"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
)

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
