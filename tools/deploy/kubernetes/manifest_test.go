package kubernetes

import (
	"encoding/json"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"stampede/tools/deploy/program"
)

func isBase(t *testing.T) bool {
	t.Helper()
	return path.Base(t.Name()) == "base"
}

// settings returns the environment of a container that has a value in the manifests, with those of its ConfigMaps.
func (m *manifest) settings(t *testing.T, c container) map[string]string {
	t.Helper()
	values := map[string]string{}
	for _, from := range c.EnvFrom {
		for name, value := range m.one(t, "ConfigMap", from.ConfigMapRef.Name).Data {
			values[name] = value
		}
	}
	for _, v := range c.Env {
		values[v.Name] = v.Value
	}
	return values
}

func TestWorkloads(t *testing.T) {
	both(t, func(t *testing.T, m *manifest) {
		want := map[string]string{
			"stampede-ingress": "serve", "stampede-worker": "work", "stampede-relay": "relay run",
			"stampede-dashboard": "dashboard", "stampede-migrate": "migrate up",
		}
		for _, o := range m.workloads() {
			c := o.container(t)
			if got := strings.Join(c.Args, " "); got != want[o.Metadata.Name] || len(c.Command) > 0 {
				t.Errorf("%s runs %q, want %q of the image's entrypoint", o, got, want[o.Metadata.Name])
			}
			delete(want, o.Metadata.Name)
		}
		if len(want) > 0 {
			t.Errorf("missing: %v", want)
		}
	})
}

func TestSelectorsMatchPods(t *testing.T) {
	both(t, func(t *testing.T, m *manifest) {
		pods := m.workloads()
		for _, o := range pods {
			labels := o.Spec.Template.Metadata.Labels
			if o.component() == "" || labels["app.kubernetes.io/component"] != o.component() ||
				labels["app.kubernetes.io/name"] != "stampede" {
				t.Errorf("the pods of %s have the labels %v", o, labels)
			}
			for _, spread := range o.Spec.Template.Spec.TopologySpreadConstraints {
				if got := selected(pods, spread.LabelSelector); !slices.Equal(got, []string{o.component()}) {
					t.Errorf("%s spreads %v, want its own pods", o, got)
				}
			}
		}
		for _, o := range m.objects {
			var s selector
			var err error
			switch o.Kind {
			case "Deployment", "StatefulSet", "PodDisruptionBudget":
				err = json.Unmarshal(o.Spec.Selector, &s)
			case "Service":
				err = json.Unmarshal(o.Spec.Selector, &s.MatchLabels)
			case "NetworkPolicy":
				s = o.Spec.PodSelector
			default:
				continue
			}
			if err != nil {
				t.Fatalf("%s: %v", o, err)
			}
			got := selected(pods, s)
			if s.MatchLabels["app.kubernetes.io/name"] != "stampede" {
				t.Errorf("%s may select the pods of others", o)
			}
			want := []string{o.component()}
			if o.Kind == "NetworkPolicy" {
				if len(got) == 0 {
					t.Errorf("%s selects no pod", o)
				}
			} else if !slices.Equal(got, want) {
				t.Errorf("%s selects %v, want %v", o, got, want)
			}
		}
	})
}

// selected returns the components of the pods that a selector selects.
func selected(pods []object, s selector) (components []string) {
	for _, o := range pods {
		if s.matches(o.Spec.Template.Metadata.Labels) {
			components = append(components, o.component())
		}
	}
	return components
}

func TestServicesUsePortsOfContainers(t *testing.T) {
	both(t, func(t *testing.T, m *manifest) {
		for _, service := range m.of("Service") {
			for _, o := range m.workloads() {
				if o.component() != service.component() {
					continue
				}
				for _, p := range service.Spec.Ports {
					if _, err := o.container(t).port(p.TargetPort); err != nil {
						t.Errorf("%s: %v", service, err)
					}
				}
			}
		}
		for _, o := range m.of("StatefulSet") {
			service := m.one(t, "Service", o.Spec.ServiceName)
			if service.Spec.ClusterIP != "None" || service.component() != o.component() {
				t.Errorf("%s takes its names from %s, which is not headless, or for others", o, service)
			}
		}
		for _, o := range m.of("Ingress") {
			for _, p := range o.Spec.Rules[0].HTTP.Paths {
				service := m.one(t, "Service", p.Backend.Service.Name)
				if service.Spec.Ports[0].Name != p.Backend.Service.Port.Name || service.component() != "ingress" {
					t.Errorf("%s sends %s to %s:%s", o, p.Path, service, p.Backend.Service.Port.Name)
				}
				if p.Path == "/" || strings.HasPrefix("/metrics", p.Path) {
					t.Errorf("%s shows the metrics, by %s", o, p.Path)
				}
			}
		}
	})
}

// The dashboard finds all processes by the names of headless services.
func TestDashboardScrapesEveryProcess(t *testing.T) {
	both(t, func(t *testing.T, m *manifest) {
		c := m.one(t, "Deployment", "stampede-dashboard").container(t)
		targets := m.settings(t, c)["STAMPEDE_SCRAPE"]
		for _, o := range m.workloads() {
			if o.component() == "dashboard" || o.component() == "migrate" {
				continue
			}
			found := false
			for _, service := range m.of("Service") {
				if service.component() != o.component() || service.Spec.ClusterIP != "None" {
					continue
				}
				found = strings.Contains(targets, "dns+http://"+service.Metadata.Name+":9090/metrics")
			}
			if !found {
				t.Errorf("%s is not in %s", o, targets)
			}
		}
	})
}

func TestPodsAreHardened(t *testing.T) {
	both(t, func(t *testing.T, m *manifest) {
		for _, o := range m.workloads() {
			pod, c := o.Spec.Template.Spec, o.container(t)
			if !pod.SecurityContext.RunAsNonRoot || pod.SecurityContext.RunAsUser != 65532 || pod.HostNetwork {
				t.Errorf("%s may run as root: %+v", o, pod.SecurityContext)
			}
			if pod.SecurityContext.SeccompProfile.Type != "RuntimeDefault" {
				t.Errorf("%s has no filter of system calls", o)
			}
			if pod.AutomountServiceAccountToken == nil || *pod.AutomountServiceAccountToken {
				t.Errorf("%s has a token of Kubernetes", o)
			}
			s := c.SecurityContext
			if !s.ReadOnlyRootFilesystem || s.Privileged || s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation ||
				!slices.Equal(s.Capabilities.Drop, []string{"ALL"}) || len(s.Capabilities.Add) > 0 {
				t.Errorf("%s has more rights than it needs: %+v", o, s)
			}
		}
	})
}

func TestMemoryOfGoIsBelowTheLimit(t *testing.T) {
	mebibytes := func(text string) int {
		n, err := strconv.Atoi(strings.TrimSuffix(strings.TrimSuffix(text, "B"), "Mi"))
		if err != nil {
			t.Fatalf("%s is not in MiB", text)
		}
		return n
	}
	both(t, func(t *testing.T, m *manifest) {
		for _, o := range m.workloads() {
			c := o.container(t)
			limit := mebibytes(c.Resources.Limits["memory"])
			if got := mebibytes(m.settings(t, c)["GOMEMLIMIT"]); got > limit*4/5 || got < limit/2 {
				t.Errorf("%s: GOMEMLIMIT is %d MiB of %d", o, got, limit)
			}
			if c.Resources.Requests["memory"] != c.Resources.Limits["memory"] || c.Resources.Requests["cpu"] == "" {
				t.Errorf("%s requests %v, and its limits are %v", o, c.Resources.Requests, c.Resources.Limits)
			}
		}
	})
}

func TestProbes(t *testing.T) {
	both(t, func(t *testing.T, m *manifest) {
		for _, o := range m.workloads() {
			c := o.container(t)
			if o.Kind == "Job" {
				if o.Spec.Template.Spec.RestartPolicy != "OnFailure" {
					t.Errorf("%s is not repeated", o)
				}
				continue
			}
			for want, p := range map[string][]*probe{"/livez": {c.StartupProbe, c.LivenessProbe}, "/readyz": {c.ReadinessProbe}} {
				for _, p := range p {
					if p == nil || p.HTTPGet.Path != want {
						t.Fatalf("%s has the probe %+v, want %s", o, p, want)
					}
					if _, err := c.port(p.HTTPGet.Port); err != nil {
						t.Errorf("%s: %v", o, err)
					}
				}
			}
		}
	})
}

// seconds returns the sum of settings that are durations.
func seconds(t *testing.T, settings map[string]string, names ...string) (sum int) {
	t.Helper()
	for _, name := range names {
		d, err := time.ParseDuration(settings[name])
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		sum += int(d.Seconds())
	}
	return sum
}

// What the kernel kills before it has finished costs buyers an answer, and orders a wait.
func TestGracePeriodsCoverStops(t *testing.T) {
	const reserve = 5 // seconds; the rest of a stop, such as closing connections
	both(t, func(t *testing.T, m *manifest) {
		for _, o := range m.workloads() {
			c := o.container(t)
			var takes int
			switch settings := m.settings(t, c); o.component() {
			case "ingress":
				takes = seconds(t, settings, "STAMPEDE_STOP_DELAY", "STAMPEDE_DRAIN_TIMEOUT")
				p := c.ReadinessProbe
				unready := p.PeriodSeconds*p.FailureThreshold + p.TimeoutSeconds
				if delay := seconds(t, settings, "STAMPEDE_STOP_DELAY"); unready >= delay {
					t.Errorf("%s: after %d s it takes no requests, and Kubernetes may see that after %d s", o, delay, unready)
				}
				if o.Spec.Strategy.RollingUpdate.MaxUnavailable != float64(0) {
					t.Errorf("%s: a rollout takes an ingress away before its successor is ready", o)
				}
			case "worker":
				const handover = 10 / 8 // STAMPEDE_MIN_IDLE ÷ 8
				takes = seconds(t, settings, "STAMPEDE_DRAIN_TIMEOUT") + handover
			case "relay":
				takes = seconds(t, settings, "STAMPEDE_DRAIN_TIMEOUT")
			default:
				continue
			}
			if grace := o.Spec.Template.Spec.GracePeriodSeconds; grace < takes+reserve {
				t.Errorf("%s: SIGKILL comes after %d s, and a stop may take %d", o, grace, takes)
			}
		}
	})
}

func TestWorkersKeepTheirNames(t *testing.T) {
	both(t, func(t *testing.T, m *manifest) {
		for _, v := range m.one(t, "StatefulSet", "stampede-worker").container(t).Env {
			if v.Name == "STAMPEDE_CONSUMER" && v.ValueFrom.FieldRef != nil &&
				v.ValueFrom.FieldRef.FieldPath == "metadata.name" {
				return
			}
		}
		t.Error("STAMPEDE_CONSUMER is not the name of the pod")
	})
}

func TestAutoscalersOwnTheirTargets(t *testing.T) {
	both(t, func(t *testing.T, m *manifest) {
		// What a process opens in Postgres (docs/operations.md), with 4 more for a worker that rebuilds.
		opens := map[string]int{"ingress": 19, "worker": 12, "relay": 4, "dashboard": 8}
		connections := 10 // commands, migrations, and what Postgres keeps for its superuser
		for _, o := range m.workloads() {
			if o.Spec.Replicas != nil {
				connections += *o.Spec.Replicas * opens[o.component()]
			}
		}
		metrics := map[string]string{"Deployment stampede-ingress": "Resource", "StatefulSet stampede-worker": "External"}
		for _, hpa := range m.of("HorizontalPodAutoscaler") {
			target := m.one(t, hpa.Spec.ScaleTargetRef.Kind, hpa.Spec.ScaleTargetRef.Name)
			if target.Spec.Replicas != nil {
				t.Errorf("%s: each apply would undo what the autoscaler did", target)
			}
			if len(hpa.Spec.Metrics) != 1 || hpa.Spec.Metrics[0].Type != metrics[target.String()] {
				t.Errorf("%s scales by %+v", hpa, hpa.Spec.Metrics)
			}
			if hpa.Spec.MinReplicas < 2 {
				t.Errorf("%s keeps %d pods: when one stops, nobody is left", hpa, hpa.Spec.MinReplicas)
			}
			delete(metrics, target.String())
			connections += hpa.Spec.MaxReplicas * opens[target.component()]
			if target.component() != "worker" {
				continue
			}
			partitions, err := strconv.Atoi(m.settings(t, target.container(t))["STAMPEDE_PARTITIONS"])
			if err != nil || hpa.Spec.MaxReplicas > max(partitions, 2) {
				t.Errorf("%s: up to %d workers for %d partitions, each of which has one reader", hpa, hpa.Spec.MaxReplicas,
					partitions)
			}
		}
		if len(metrics) > 0 {
			t.Errorf("not scaled: %v", metrics)
		}
		if connections > 200 {
			t.Errorf("they may open %d connections, and README.md says that 200 are enough", connections)
		}
	})
}

// A drain of a node must neither take all pods of a kind nor wait for ever.
func TestDisruptionBudgets(t *testing.T) {
	both(t, func(t *testing.T, m *manifest) {
		budgets := map[string]bool{}
		for _, o := range m.of("PodDisruptionBudget") {
			budgets[o.component()] = true
			if o.Spec.MaxUnavailable != float64(1) {
				t.Errorf("%s allows %v pods to be away, want 1", o, o.Spec.MaxUnavailable)
			}
		}
		for _, o := range m.workloads() {
			isAlone := o.Kind == "Job" || o.Spec.Replicas != nil && *o.Spec.Replicas == 1
			if budgets[o.component()] == isAlone {
				t.Errorf("%s has a disruption budget: %t", o, budgets[o.component()])
			}
		}
	})
}

func TestImageIsNamedInOnePlace(t *testing.T) {
	both(t, func(t *testing.T, m *manifest) {
		want := "registry.example.com/stampede:v1.0.0"
		if isBase(t) {
			want = "stampede:dev"
		}
		for _, o := range m.workloads() {
			if got := o.container(t).Image; got != want {
				t.Errorf("%s runs %s, want %s", o, got, want)
			}
		}
	})
	named := 0
	files, err := filepath.Glob(filepath.Join(folder, "*", "*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		named += strings.Count(read(t, file), " image:")
	}
	if named != 1 {
		t.Errorf("%d files name the image of a container, want only base/pod.yaml", named)
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

var literal = regexp.MustCompile(`--from-(?:literal|file)=([a-z-]+)=`)

// Secrets are made by their owner, with the command in README.md, and never by these manifests.
func TestSecretsAreReferencesThatAreDocumented(t *testing.T) {
	readme := read(t, filepath.Join(folder, "README.md"))
	documented := map[string]bool{}
	for _, found := range literal.FindAllStringSubmatch(readme, -1) {
		documented[found[1]] = true
	}
	if !strings.Contains(readme, "create secret generic stampede ") {
		t.Error("README.md does not create the secret stampede")
	}
	both(t, func(t *testing.T, m *manifest) {
		if secrets := m.of("Secret"); len(secrets) > 0 {
			t.Errorf("the manifests hold %v", secrets)
		}
		used := map[string]bool{}
		for _, o := range m.workloads() {
			for _, v := range o.container(t).Env {
				ref := v.ValueFrom.SecretKeyRef
				if ref == nil {
					if isSecret.MatchString(v.Name) {
						t.Errorf("%s: %s is not a reference", o, v.Name)
					}
					continue
				}
				used[ref.Key] = true
				if ref.Name != "stampede" || !documented[ref.Key] {
					t.Errorf("%s: README.md does not say how %s of the secret %s is made", o, ref.Key, ref.Name)
				}
			}
		}
		for key := range documented {
			if !used[key] {
				t.Errorf("README.md makes %s, which nothing uses", key)
			}
		}
		for _, o := range m.of("ConfigMap") {
			for name := range o.Data {
				if isSecret.MatchString(name) {
					t.Errorf("%s holds %s", o, name)
				}
			}
		}
	})
}

var isSecret = regexp.MustCompile(`^(REDIS_URL|DATABASE_URL|STAMPEDE_.*_(SECRET|TOKEN))$`)

// The rule of README.md is in a file of its own, which prometheus-adapter takes.
func TestAdapterServesTheMetricOfTheAutoscaler(t *testing.T) {
	rules := read(t, filepath.Join(folder, "prometheus-adapter.yaml"))
	for _, hpa := range render(t, "base").of("HorizontalPodAutoscaler") {
		for _, metric := range hpa.Spec.Metrics {
			name := metric.External.Metric.Name
			if metric.Type != "External" {
				continue
			}
			for _, part := range []string{
				`seriesQuery: '` + name + `{`, `matches: ^` + name + `$`,
				// All workers report all streams, so the streams are summed and the workers are not.
				`metricsQuery: sum(max by (stream) (<<.Series>>{<<.LabelMatchers>>}))`,
			} {
				if !strings.Contains(rules, part) {
					t.Errorf("prometheus-adapter.yaml lacks %s", part)
				}
			}
		}
	}
}

// Each variable is one that the command of its container reads.
func TestVariablesAreThoseOfTheCommand(t *testing.T) {
	both(t, func(t *testing.T, m *manifest) {
		for _, o := range m.workloads() {
			c := o.container(t)
			known := program.Variables(t, c.Args)
			if len(known) < 5 {
				t.Fatalf("%v --help names only %v", c.Args, known)
			}
			for name := range m.settings(t, c) {
				if !known[name] {
					t.Errorf("%s: %v does not read %s", o, c.Args, name)
				}
			}
		}
	})
}
