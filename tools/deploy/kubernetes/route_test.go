package kubernetes

import (
	"encoding/json"
	"regexp"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"

	"stampede/tools/deploy/program"
)

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
