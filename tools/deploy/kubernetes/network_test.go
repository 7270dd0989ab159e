package kubernetes

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"

	"stampede/tools/deploy/program"
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

// takes reports whether a match of a route takes a request.
func takes(match gatewayv1.HTTPRouteMatch, method, path string) (ok bool) {
	value := *match.Path.Value
	switch *match.Path.Type {
	case gatewayv1.PathMatchPathPrefix:
		ok = path == value || strings.HasPrefix(path, value+"/")
	case gatewayv1.PathMatchExact:
		ok = path == value
	case gatewayv1.PathMatchRegularExpression:
		ok = regexp.MustCompile(value).MatchString(path)
	}
	return ok && (match.Method == nil || string(*match.Method) == method)
}

// Buyers reach all of the interface that is for them, as Stripe does, and nothing that is for operators, the shop's
// server or the cluster. A call has one rule, because the order of regular expressions differs, and that of a stream
// has no timeout.
func TestRouteShowsCallsOfBuyersOnly(t *testing.T) {
	var spec struct {
		Paths map[string]map[string]json.RawMessage `json:"paths"`
	}
	if err := yaml.Unmarshal([]byte(program.Read(t, program.Root+"/ingress/openapi.yaml")), &spec); err != nil {
		t.Fatal(err)
	}
	m := render(t, "example")
	route, gateway := one[*gatewayv1.HTTPRoute](t, m, "stampede"), one[*gatewayv1.Gateway](t, m, "stampede")
	if string(route.Spec.ParentRefs[0].Name) != gateway.Name ||
		route.Spec.Hostnames[0] != *gateway.Spec.Listeners[0].Hostname {
		t.Errorf("the gateway %s does not take the route", gateway.Name)
	}
	for _, rule := range route.Spec.Rules {
		to := rule.BackendRefs[0]
		service := one[*corev1.Service](t, m, string(to.Name))
		if component(service) != "ingress" || service.Spec.Ports[0].Port != int32(*to.Port) {
			t.Errorf("a rule sends requests to %s:%d", to.Name, *to.Port)
		}
		if filter := rule.Filters[0].RequestHeaderModifier; !slices.Equal(filter.Remove, []string{"X-User-ID"}) {
			t.Error("a client can set X-User-ID")
		}
	}
	calls := 0
	for path, operations := range spec.Paths {
		path = regexp.MustCompile(`\{[^}]*\}`).ReplaceAllString(path, "0190a0b0-1111-7000-8000-000000000001")
		for method, text := range operations {
			var operation struct{ Tags []string }
			if method = strings.ToUpper(method); !slices.Contains([]string{"GET", "POST"}, method) {
				continue
			}
			if err := json.Unmarshal(text, &operation); err != nil {
				t.Fatal(err)
			}
			calls++
			timeouts := func(method string) (found []string) {
				for _, rule := range route.Spec.Rules {
					for _, match := range rule.Matches {
						if takes(match, method, path) {
							found = append(found, string(*rule.Timeouts.Request))
						}
					}
				}
				return found
			}
			var want []string
			switch isHidden := slices.Contains([]string{"Operators", "Health"}, operation.Tags[0]); {
			case isHidden, strings.HasSuffix(path, "/pay"), path == "/v1/payments":
			case strings.HasSuffix(path, "/events"), strings.HasSuffix(path, "/draw/leaves"):
				want = []string{"0s"}
			default:
				want = []string{"60s"}
			}
			if got := timeouts(method); !slices.Equal(got, want) {
				t.Errorf("%s %s, of %s, has the timeouts %v of its rules, want %v", method, path, operation.Tags, got, want)
			}
			// Browsers ask with OPTIONS before they call.
			if want != nil && path != "/v1/payments/stripe" && !slices.Equal(timeouts("OPTIONS"), want) {
				t.Errorf("%s is not open to OPTIONS", path)
			}
		}
	}
	if calls < 20 {
		t.Errorf("the interface has %d calls", calls)
	}
}

// inContainer is what the container of a workload gets: its environment, and a free port for each of its own.
type inContainer struct {
	env   []string
	ports map[int32]string
}

func (m *manifest) inContainer(t *testing.T, w workload, secrets map[string]string) inContainer {
	t.Helper()
	// The root file system is read-only, and there is no folder for temporary files.
	in := inContainer{env: []string{"TMPDIR=/nonexistent"}, ports: map[int32]string{}}
	for _, p := range w.Ports {
		in.ports[p.ContainerPort] = program.FreePort(t)
	}
	values := m.settings(t, w)
	for _, v := range w.Env {
		switch from := v.ValueFrom; {
		case from == nil:
		case from.FieldRef != nil:
			values[v.Name] = w.GetName() + "-0"
		case from.SecretKeyRef != nil:
			value, ok := secrets[from.SecretKeyRef.Key]
			if ok {
				values[v.Name] = value
			} else if delete(values, v.Name); !is(from.SecretKeyRef.Optional, true) {
				t.Fatalf("%s: the secret has no %s", w, from.SecretKeyRef.Key)
			}
		}
	}
	if file := values["STAMPEDE_OPERATORS_FILE"]; file != "" {
		_, key := w.mounted(t, file)
		values["STAMPEDE_OPERATORS_FILE"] = filepath.Join(t.TempDir(), key)
		if err := os.WriteFile(values["STAMPEDE_OPERATORS_FILE"], []byte(secrets[key]), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, value := range values {
		// The address of a port on all interfaces, which on this host may be taken.
		if port, err := strconv.Atoi(strings.TrimPrefix(value, ":")); err == nil && strings.HasPrefix(value, ":") {
			if in.ports[int32(port)] == "" {
				t.Errorf("%s: %s=%s is no port of the container", w, name, value)
			}
			value = "127.0.0.1:" + in.ports[int32(port)]
		}
		in.env = append(in.env, name+"="+value)
	}
	return in
}

// Every container runs as the manifests say, on real servers: it starts, answers its probes, and ends within its grace
// period after SIGTERM.
func TestContainersRun(t *testing.T) {
	servers := program.Start(t)
	m := render(t, "example")
	for _, w := range m.workloads(t) {
		t.Run(w.GetName(), func(t *testing.T) {
			t.Parallel()
			in := m.inContainer(t, w, servers.Secrets())
			began := time.Now()
			p := program.Run(t, w.Args, in.env)
			if w.isJob() {
				if err := p.Wait(); err != nil {
					t.Errorf("%v: %s", err, p.Output())
				}
				return
			}
			for _, probe := range []*corev1.Probe{w.StartupProbe, w.ReadinessProbe, w.LivenessProbe} {
				port, err := w.port(probe.HTTPGet.Port)
				if err != nil {
					t.Fatal(err)
				}
				p.Answer(fmt.Sprintf("http://127.0.0.1:%s%s", in.ports[port], probe.HTTPGet.Path), http.StatusOK)
			}
			t.Logf("ready after %v", time.Since(began))
			if w.pod.Annotations["prometheus.io/scrape"] == "true" {
				port, err := w.port(intstr.Parse(w.pod.Annotations["prometheus.io/port"]))
				if err != nil {
					t.Fatal(err)
				}
				var scaled []*regexp.Regexp // by a series of each stream
				if component(w) == "worker" {
					scaled = append(scaled, regexp.MustCompile(`(?m)^`+m.workerMetric(t)+`\{.*stream="`))
				}
				p.Answer("http://127.0.0.1:"+in.ports[port]+"/metrics", http.StatusOK, scaled...)
			}
			grace := time.Duration(*w.pod.Spec.TerminationGracePeriodSeconds) * time.Second
			t.Logf("ended %v after SIGTERM, of %v", p.Stop(grace), grace)
			if err := p.Wait(); err != nil {
				t.Errorf("it ends with %v:\n%s", err, p.Output())
			}
		})
	}
}
