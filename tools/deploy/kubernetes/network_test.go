package kubernetes

import (
	"fmt"
	"net/netip"
	"testing"
)

// rule is one of a network policy. It allows everything that it does not restrict.
type rule struct {
	From  []peer `json:"from"`
	To    []peer `json:"to"`
	Ports []struct {
		Protocol string `json:"protocol"`
		Port     any    `json:"port"`
	} `json:"ports"`
}

type peer struct {
	PodSelector       *selector `json:"podSelector"`
	NamespaceSelector *selector `json:"namespaceSelector"`
	IPBlock           *struct {
		CIDR   string   `json:"cidr"`
		Except []string `json:"except"`
	} `json:"ipBlock"`
}

// end is one end of a connection: a pod, or an address outside of the cluster.
type end struct {
	name      string
	namespace string // "" outside of the cluster
	labels    map[string]string
	address   netip.Addr
	ports     map[string]int // by name
}

// own is the namespace of Stampede, as far as these tests know.
const own = "the namespace of Stampede"

func outside(name, address string) end { return end{name: name, address: netip.MustParseAddr(address)} }

func (p peer) is(e end) bool {
	if p.IPBlock != nil {
		inside := e.namespace == "" && netip.MustParsePrefix(p.IPBlock.CIDR).Contains(e.address)
		for _, except := range p.IPBlock.Except {
			inside = inside && !netip.MustParsePrefix(except).Contains(e.address)
		}
		return inside
	}
	if e.namespace == "" {
		return false
	}
	if p.NamespaceSelector == nil {
		return e.namespace == own && p.PodSelector.matches(e.labels)
	}
	return p.NamespaceSelector.matches(map[string]string{"kubernetes.io/metadata.name": e.namespace}) &&
		(p.PodSelector == nil || p.PodSelector.matches(e.labels))
}

// allows reports whether one of the rules allows a connection to a port of an end.
func allows(rules []rule, peers func(rule) []peer, other end, to end, port int) bool {
	for _, r := range rules {
		isPeer := len(peers(r)) == 0
		for _, p := range peers(r) {
			isPeer = isPeer || p.is(other)
		}
		isPort := len(r.Ports) == 0
		for _, p := range r.Ports {
			name, _ := p.Port.(string)
			isPort = isPort || p.Port == float64(port) || to.ports[name] == port
		}
		if isPeer && isPort {
			return true
		}
	}
	return false
}

// connects reports whether the policies let a connection through, at both of its ends.
func (m *manifest) connects(from, to end, port int) bool {
	return m.passes(from, "Egress", func(o object) []rule { return o.Spec.Egress },
		func(r rule) []peer { return r.To }, to, to, port) &&
		m.passes(to, "Ingress", func(o object) []rule { return o.Spec.Ingress },
			func(r rule) []peer { return r.From }, from, to, port)
}

func (m *manifest) passes(
	at end, direction string, rules func(object) []rule, peers func(rule) []peer, other, to end, port int,
) bool {
	isRestricted, isAllowed := false, false
	for _, policy := range m.of("NetworkPolicy") {
		if at.namespace != own || !policy.Spec.PodSelector.matches(at.labels) {
			continue
		}
		for _, of := range policy.Spec.PolicyTypes {
			if of == direction {
				isRestricted = true
				isAllowed = isAllowed || allows(rules(policy), peers, other, to, port)
			}
		}
	}
	return isAllowed || !isRestricted
}

func TestOnlyListedConnectionsAreAllowed(t *testing.T) {
	both(t, func(t *testing.T, m *manifest) {
		pods := map[string]end{}
		for _, o := range m.workloads() {
			ports := map[string]int{}
			for _, p := range o.container(t).Ports {
				ports[p.Name] = p.ContainerPort
			}
			pods[o.component()] = end{o.component(), own, o.Spec.Template.Metadata.Labels, netip.Addr{}, ports}
		}
		in := func(namespace string) end { return end{name: namespace, namespace: namespace} }
		proxy, prometheus, dns, stranger := in("ingress-nginx"), in("monitoring"), in("kube-system"), in("else")
		neighbour := end{"a neighbour", own, map[string]string{"app.kubernetes.io/component": "ingress"}, netip.Addr{}, nil}
		server, web := outside("a server", "10.1.0.5"), outside("a receiver", "203.0.113.5")
		clouds := outside("the credentials of a cloud", "169.254.169.254")
		const http, metrics, redis, postgres, https = 8080, 9090, 6379, 5432, 443

		type connection struct {
			from, to end
			port     int
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
				allowed = append(allowed, connection{prometheus, pod, metrics}, connection{pods["dashboard"], pod, metrics})
			}
		}
		wanted := map[string]bool{}
		for _, c := range allowed {
			wanted[fmt.Sprintf("%s → %s:%d", c.from.name, c.to.name, c.port)] = true
		}
		ends := []end{proxy, prometheus, dns, stranger, neighbour, server, web, clouds}
		for _, pod := range pods {
			ends = append(ends, pod)
		}
		seen := 0
		for _, from := range ends {
			for _, to := range ends {
				if _, fromUs := pods[from.name]; !fromUs && pods[to.name].name == "" {
					continue // none of our business
				}
				for _, port := range []int{53, http, 8090, metrics, redis, postgres, https, 22} {
					way := fmt.Sprintf("%s → %s:%d", from.name, to.name, port)
					open := m.connects(from, to, port)
					// The base does not know where Redis and Postgres are.
					if !wanted[way] && open && pods[to.name].name == "" && (port == redis || port == postgres) && isBase(t) {
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
