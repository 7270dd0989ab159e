package kubernetes

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
)

// end is one end of a connection: a pod, or an address outside of the cluster.
type end struct {
	name      string
	namespace string // "" outside of the cluster
	labels    map[string]string
	address   netip.Addr
	ports     map[string]int32 // by name
}

// own is the namespace of Stampede, as far as these tests know.
const own = "the namespace of Stampede"

func outside(name, address string) end { return end{name: name, address: netip.MustParseAddr(address)} }

// isPeer reports whether a rule names an end.
func (e end) isPeer(t *testing.T, p networkingv1.NetworkPolicyPeer) bool {
	t.Helper()
	switch {
	case p.IPBlock != nil:
		inside := e.namespace == "" && netip.MustParsePrefix(p.IPBlock.CIDR).Contains(e.address)
		return inside && !slices.ContainsFunc(p.IPBlock.Except, func(except string) bool {
			return netip.MustParsePrefix(except).Contains(e.address)
		})
	case e.namespace == "":
		return false
	case p.NamespaceSelector == nil:
		return e.namespace == own && matches(t, p.PodSelector, e.labels)
	}
	return matches(t, p.NamespaceSelector, map[string]string{"kubernetes.io/metadata.name": e.namespace}) &&
		(p.PodSelector == nil || matches(t, p.PodSelector, e.labels))
}

// rule is one of a network policy. It allows everything that it does not restrict.
type rule struct {
	peers []networkingv1.NetworkPolicyPeer
	ports []networkingv1.NetworkPolicyPort
}

// allows reports whether a rule allows a connection with the other end, to a port of one of them.
func (r rule) allows(t *testing.T, other, to end, port int32) bool {
	t.Helper()
	isPeer, isPort := len(r.peers) == 0, len(r.ports) == 0
	for _, p := range r.peers {
		isPeer = isPeer || other.isPeer(t, p)
	}
	for _, p := range r.ports {
		isPort = isPort || p.Port.IntVal == port || to.ports[p.Port.StrVal] == port
	}
	return isPeer && isPort
}

// connects reports whether the policies let a connection through, at both of its ends.
func (m *manifest) connects(t *testing.T, from, to end, port int32) bool {
	t.Helper()
	passes := func(at, other end, direction networkingv1.PolicyType) bool {
		isRestricted, isAllowed := false, false
		for _, policy := range all[*networkingv1.NetworkPolicy](m) {
			spec := policy.Spec
			if at.namespace != own || !matches(t, &spec.PodSelector, at.labels) ||
				!slices.Contains(spec.PolicyTypes, direction) {
				continue
			}
			isRestricted = true
			var rules []rule
			for _, r := range spec.Ingress {
				if direction == networkingv1.PolicyTypeIngress {
					rules = append(rules, rule{r.From, r.Ports})
				}
			}
			for _, r := range spec.Egress {
				if direction == networkingv1.PolicyTypeEgress {
					rules = append(rules, rule{r.To, r.Ports})
				}
			}
			for _, r := range rules {
				isAllowed = isAllowed || r.allows(t, other, to, port)
			}
		}
		return isAllowed || !isRestricted
	}
	return passes(from, to, networkingv1.PolicyTypeEgress) && passes(to, from, networkingv1.PolicyTypeIngress)
}

func TestOnlyListedConnectionsAreAllowed(t *testing.T) {
	both(t, func(t *testing.T, m *manifest) {
		pods := map[string]end{}
		for _, w := range m.workloads(t) {
			ports := map[string]int32{}
			for _, p := range w.Ports {
				ports[p.Name] = p.ContainerPort
			}
			pods[component(w)] = end{component(w), own, w.pod.Labels, netip.Addr{}, ports}
		}
		in := func(namespace string) end { return end{name: namespace, namespace: namespace} }
		proxy, prometheus, dns := in("envoy-gateway-system"), in("monitoring"), in("kube-system")
		checkout, stranger := in("shop"), in("else")
		neighbour := end{"a neighbour", own, map[string]string{"app.kubernetes.io/component": "ingress"}, netip.Addr{}, nil}
		server, web := outside("a server", "10.1.0.5"), outside("a receiver", "203.0.113.5")
		clouds := outside("the credentials of a cloud", "169.254.169.254")
		const http, metrics, redis, postgres, https, kafka, otlp = 8080, 9090, 6379, 5432, 443, 9092, 4318

		type connection struct {
			from, to end
			port     int32
		}
		allowed := []connection{{proxy, pods["ingress"], http}}
		for _, component := range []string{"ingress", "worker", "relay", "dashboard", "migrate"} {
			pod := pods[component]
			allowed = append(allowed, connection{pod, dns, 53}, connection{pod, server, postgres})
			if component != "migrate" {
				allowed = append(allowed, connection{pod, server, redis})
			}
			if component == "ingress" || component == "relay" {
				allowed = append(allowed, connection{pod, web, https}, connection{pod, server, https})
			}
			if component == "ingress" || component == "worker" || component == "relay" {
				allowed = append(allowed, connection{prometheus, pod, metrics}, connection{pods["dashboard"], pod, metrics},
					connection{pod, prometheus, otlp})
			}
		}
		allowed = append(allowed, connection{pods["relay"], server, kafka})
		if m.name == "example" {
			allowed = append(allowed, connection{checkout, pods["ingress"], http})
		}
		wanted := map[string]bool{}
		for _, c := range allowed {
			wanted[fmt.Sprintf("%s → %s:%d", c.from.name, c.to.name, c.port)] = true
		}
		ends := []end{proxy, prometheus, dns, checkout, stranger, neighbour, server, web, clouds}
		for _, pod := range pods {
			ends = append(ends, pod)
		}
		seen := 0
		for _, from := range ends {
			for _, to := range ends {
				if _, fromUs := pods[from.name]; !fromUs && pods[to.name].name == "" {
					continue // neither end is ours
				}
				for _, port := range []int32{53, http, 8090, metrics, redis, postgres, https, kafka, otlp, 22} {
					way := fmt.Sprintf("%s → %s:%d", from.name, to.name, port)
					open := m.connects(t, from, to, port)
					// The base does not know where Redis, Postgres and Kafka are.
					isServer := port == redis || port == postgres || port == kafka
					if !wanted[way] && open && pods[to.name].name == "" && isServer && m.name == "base" {
						continue
					}
					if open != wanted[way] {
						t.Errorf("%s is allowed: %t, want %t", way, open, wanted[way])
					}
					if open {
						seen++
					}
				}
			}
		}
		if seen < len(wanted) {
			t.Errorf("%d connections are allowed, want %d", seen, len(wanted))
		}
	})
}
