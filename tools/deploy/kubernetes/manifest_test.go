package kubernetes

import (
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/yaml"

	"stampede/tools/deploy/program"
)

func TestWorkloads(t *testing.T) {
	both(t, func(t *testing.T, m *manifest) {
		want := map[string]string{
			"stampede-ingress": "serve", "stampede-worker": "work", "stampede-relay": "relay run",
			"stampede-dashboard": "dashboard", "stampede-migrate": "migrate up",
		}
		for _, w := range m.workloads(t) {
			if got := strings.Join(w.Args, " "); got != want[w.GetName()] || len(w.Command) > 0 {
				t.Errorf("%s runs %q, want %q of the image's entrypoint", w, got, want[w.GetName()])
			}
			delete(want, w.GetName())
		}
		if len(want) > 0 {
			t.Errorf("missing: %v", want)
		}
	})
}

func TestSelectorsMatchPods(t *testing.T) {
	both(t, func(t *testing.T, m *manifest) {
		pods := m.workloads(t)
		// selects checks what a selector selects: the pods of its object's component, or of some for a network policy.
		selects := func(o metav1.Object, s *metav1.LabelSelector, isPolicy bool) {
			var got []string
			for _, w := range pods {
				if matches(t, s, w.pod.Labels) {
					got = append(got, component(w))
				}
			}
			if isPolicy && len(got) == 0 || !isPolicy && !slices.Equal(got, []string{component(o)}) {
				t.Errorf("%T %s selects %v", o, o.GetName(), got)
			}
			if s.MatchLabels["app.kubernetes.io/name"] != "stampede" {
				t.Errorf("%T %s may select the pods of others", o, o.GetName())
			}
		}
		for _, w := range pods {
			if labels := w.pod.Labels; component(w) == "" || labels["app.kubernetes.io/component"] != component(w) ||
				labels["app.kubernetes.io/name"] != "stampede" {
				t.Errorf("the pods of %s have the labels %v", w, labels)
			}
			for _, spread := range w.pod.Spec.TopologySpreadConstraints {
				selects(w, spread.LabelSelector, false)
			}
			if !w.isJob() {
				selects(w, w.selector, false)
			}
		}
		for _, o := range all[*policyv1.PodDisruptionBudget](m) {
			selects(o, o.Spec.Selector, false)
		}
		for _, o := range all[*corev1.Service](m) {
			selects(o, &metav1.LabelSelector{MatchLabels: o.Spec.Selector}, false)
		}
		for _, o := range all[*networkingv1.NetworkPolicy](m) {
			selects(o, &o.Spec.PodSelector, true)
		}
	})
}

func TestServicesUsePortsOfContainers(t *testing.T) {
	both(t, func(t *testing.T, m *manifest) {
		for _, service := range all[*corev1.Service](m) {
			for _, w := range m.workloads(t) {
				if component(w) != component(service) {
					continue
				}
				for _, p := range service.Spec.Ports {
					if _, err := w.port(p.TargetPort); err != nil {
						t.Errorf("%s: %v", service.Name, err)
					}
				}
			}
		}
		for _, o := range all[*appsv1.StatefulSet](m) {
			service := one[*corev1.Service](t, m, o.Spec.ServiceName)
			if service.Spec.ClusterIP != "None" || component(service) != component(o) {
				t.Errorf("%s takes its names from %s, which is not headless, or for others", o.Name, service.Name)
			}
		}
	})
}

func TestPrometheusScrapesEveryProcess(t *testing.T) {
	m := render(t, "example")
	monitor := one[*monitoringv1.PodMonitor](t, m, "stampede")
	for _, w := range m.workloads(t) {
		_, err := w.port(intstr.FromString(*monitor.Spec.PodMetricsEndpoints[0].Port))
		hasMetrics := w.pod.Annotations["prometheus.io/scrape"] == "true"
		if got := matches(t, &monitor.Spec.Selector, w.pod.Labels); got != hasMetrics || hasMetrics && err != nil {
			t.Errorf("%s is scraped: %t, want %t (%v)", w, got, hasMetrics, err)
		}
	}
}

var ruleCommand = regexp.MustCompile(`(?s)( *)(\{ printf [^|]*?\}) \| kubectl`)

// The alerts are those of deploy/prometheus, without a copy.
func TestREADMEMakesPrometheusRule(t *testing.T) {
	found := ruleCommand.FindStringSubmatch(program.Read(t, folder+"/README.md"))
	if found == nil {
		t.Fatal("README.md has no command for the alerts")
	}
	cmd := exec.CommandContext(t.Context(), "sh", "-euc", strings.ReplaceAll(found[2], "\n"+found[1], "\n"))
	cmd.Dir = folder
	text, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	if text, err = yaml.YAMLToJSON(text); err != nil {
		t.Fatal(err)
	}
	o, err := decode(text)
	if err != nil {
		t.Fatal(err)
	}
	rules := o.(*monitoringv1.PrometheusRule).Spec.Groups[0].Rules
	want := strings.Count(program.Read(t, program.Root+"/deploy/prometheus/alerts.yml"), "- alert:")
	if len(rules) != want || want == 0 {
		t.Errorf("it has %d alerts, want %d", len(rules), want)
	}
}

// The dashboard finds all processes by the names of headless services.
func TestDashboardScrapesEveryProcess(t *testing.T) {
	eachWorkload(t, func(t *testing.T, m *manifest, w workload) {
		if w.isJob() || component(w) == "dashboard" {
			return
		}
		dashboard := slices.IndexFunc(m.workloads(t), func(w workload) bool { return component(w) == "dashboard" })
		targets := m.settings(t, m.workloads(t)[dashboard])["STAMPEDE_SCRAPE"]
		for _, service := range all[*corev1.Service](m) {
			if component(service) == component(w) && service.Spec.ClusterIP == "None" &&
				strings.Contains(targets, "dns+http://"+service.Name+":9090/metrics") {
				return
			}
		}
		t.Errorf("%s is not in %s", w, targets)
	})
}

func TestPodsAreHardened(t *testing.T) {
	eachWorkload(t, func(t *testing.T, _ *manifest, w workload) {
		pod := w.pod.Spec
		user := pod.SecurityContext
		if !is(user.RunAsNonRoot, true) || !is(user.RunAsUser, 65532) || pod.HostNetwork {
			t.Errorf("it may run as root: %+v", user)
		}
		if user.SeccompProfile == nil || user.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
			t.Error("it has no filter of system calls")
		}
		if !is(pod.AutomountServiceAccountToken, false) {
			t.Error("it has a token of Kubernetes")
		}
		rights := w.SecurityContext
		if !is(rights.ReadOnlyRootFilesystem, true) || is(rights.Privileged, true) ||
			!is(rights.AllowPrivilegeEscalation, false) ||
			!slices.Equal(rights.Capabilities.Drop, []corev1.Capability{"ALL"}) || len(rights.Capabilities.Add) > 0 {
			t.Errorf("it has more rights than it needs: %+v", rights)
		}
	})
}

// is reports whether an optional field is set to a value.
func is[T comparable](field *T, value T) bool { return field != nil && *field == value }

func TestMemoryOfGoIsBelowTheLimit(t *testing.T) {
	eachWorkload(t, func(t *testing.T, m *manifest, w workload) {
		requests, limits := w.Resources.Requests, w.Resources.Limits
		limit := limits.Memory().Value() >> 20
		text, isMebibytes := strings.CutSuffix(m.settings(t, w)["GOMEMLIMIT"], "MiB")
		got, err := strconv.ParseInt(text, 10, 64)
		if err != nil || !isMebibytes || got > limit*4/5 || got < limit/2 {
			t.Errorf("GOMEMLIMIT is %d MiB of %d (%v)", got, limit, err)
		}
		if !requests.Memory().Equal(*limits.Memory()) || requests.Cpu().IsZero() {
			t.Errorf("it requests %v, and its limits are %v", requests, limits)
		}
	})
}

func TestProbes(t *testing.T) {
	eachWorkload(t, func(t *testing.T, _ *manifest, w workload) {
		if w.isJob() {
			if w.pod.Spec.RestartPolicy != corev1.RestartPolicyOnFailure {
				t.Error("it is not repeated")
			}
			return
		}
		for want, probes := range map[string][]*corev1.Probe{
			"/livez": {w.StartupProbe, w.LivenessProbe}, "/readyz": {w.ReadinessProbe},
		} {
			for _, p := range probes {
				if p == nil || p.HTTPGet == nil || p.HTTPGet.Path != want {
					t.Fatalf("it has the probe %+v, want %s", p, want)
				}
				if _, err := w.port(p.HTTPGet.Port); err != nil {
					t.Error(err)
				}
			}
		}
		if p := w.StartupProbe; p.PeriodSeconds*p.FailureThreshold < 600 {
			t.Error("it is restarted while it waits for the migration")
		}
	})
}

// What the kernel kills before it has finished costs buyers an answer, and orders a wait.
func TestGracePeriodsCoverStops(t *testing.T) {
	eachWorkload(t, func(t *testing.T, m *manifest, w workload) {
		settings := m.settings(t, w)
		takes, command := program.StopTime(t, settings, w.Args[0]), component(w)
		if w.isJob() || command == "dashboard" {
			return
		}
		if grace := time.Duration(*w.pod.Spec.TerminationGracePeriodSeconds) * time.Second; grace < takes {
			t.Errorf("SIGKILL comes after %v, and a stop may take %v", grace, takes)
		}
		if command != "ingress" {
			return
		}
		p := w.ReadinessProbe
		unready := time.Duration(p.PeriodSeconds*p.FailureThreshold+p.TimeoutSeconds) * time.Second
		if delay, err := time.ParseDuration(settings["STAMPEDE_STOP_DELAY"]); err != nil || unready >= delay {
			t.Errorf("after %v it takes no requests, and Kubernetes may see that after %v (%v)", delay, unready, err)
		}
		rollout := one[*appsv1.Deployment](t, m, w.GetName()).Spec.Strategy.RollingUpdate
		if rollout.MaxUnavailable.String() != "0" {
			t.Error("a rollout takes an ingress away before its successor is ready")
		}
	})
}

// Each dashboard knows only its own sessions, so two never run at the same time.
func TestDashboardIsAlone(t *testing.T) {
	both(t, func(t *testing.T, m *manifest) {
		spec := one[*appsv1.Deployment](t, m, "stampede-dashboard").Spec
		if !is(spec.Replicas, 1) || spec.Strategy.Type != appsv1.RecreateDeploymentStrategyType {
			t.Errorf("%d of it run, and are replaced by %s", *spec.Replicas, spec.Strategy.Type)
		}
	})
}

func TestWorkersKeepTheirNames(t *testing.T) {
	both(t, func(t *testing.T, m *manifest) {
		worker := one[*appsv1.StatefulSet](t, m, "stampede-worker").Spec.Template.Spec.Containers[0]
		if !slices.ContainsFunc(worker.Env, func(v corev1.EnvVar) bool {
			from := v.ValueFrom
			return v.Name == "STAMPEDE_CONSUMER" && from != nil && from.FieldRef != nil &&
				from.FieldRef.FieldPath == "metadata.name"
		}) {
			t.Error("STAMPEDE_CONSUMER is not the name of the pod")
		}
	})
}

func TestAutoscalersOwnTheirTargets(t *testing.T) {
	both(t, func(t *testing.T, m *manifest) {
		// What a process opens in Postgres (docs/operations.md), with 4 more for a worker that rebuilds.
		opens := map[string]int32{"ingress": 19, "worker": 12, "relay": 4, "dashboard": 8}
		connections := int32(10) // commands, migrations, and what Postgres keeps for its superuser
		metrics := map[string]autoscalingv2.MetricSourceType{
			"stampede-ingress": autoscalingv2.ResourceMetricSourceType,
			"stampede-worker":  autoscalingv2.ExternalMetricSourceType,
		}
		scalers := map[string]*autoscalingv2.HorizontalPodAutoscaler{}
		for _, hpa := range all[*autoscalingv2.HorizontalPodAutoscaler](m) {
			scalers[hpa.Spec.ScaleTargetRef.Kind+" "+hpa.Spec.ScaleTargetRef.Name] = hpa
		}
		for _, w := range m.workloads(t) {
			if w.replicas != nil {
				connections += *w.replicas * opens[component(w)]
			}
			want, isScaled := metrics[w.GetName()]
			target := w.GetObjectKind().GroupVersionKind().Kind + " " + w.GetName()
			hpa := scalers[target]
			delete(scalers, target)
			if !isScaled && hpa == nil {
				continue
			}
			if !isScaled || hpa == nil {
				t.Errorf("%s is scaled: %t, want %t", target, hpa != nil, isScaled)
				continue
			}
			if w.replicas != nil {
				t.Errorf("%s: each apply would undo what the autoscaler did", target)
			}
			if len(hpa.Spec.Metrics) != 1 || hpa.Spec.Metrics[0].Type != want {
				t.Errorf("%s is scaled by %+v", target, hpa.Spec.Metrics)
			}
			if hpa.Spec.MinReplicas == nil || *hpa.Spec.MinReplicas < 2 {
				t.Errorf("%s: when its only pod stops, nobody is left", target)
			}
			connections += hpa.Spec.MaxReplicas * opens[component(w)]
			if component(w) != "worker" {
				continue
			}
			partitions, err := strconv.Atoi(m.settings(t, w)["STAMPEDE_PARTITIONS"])
			if err != nil || hpa.Spec.MaxReplicas > int32(max(partitions, 2)) {
				t.Errorf("up to %d workers for %d partitions, each of which has one reader", hpa.Spec.MaxReplicas, partitions)
			}
		}
		if len(scalers) > 0 {
			t.Errorf("autoscalers without a target: %v", scalers)
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
		for _, o := range all[*policyv1.PodDisruptionBudget](m) {
			budgets[component(o)] = true
			if o.Spec.MaxUnavailable.String() != "1" {
				t.Errorf("%s allows %v pods to be away, want 1", o.Name, o.Spec.MaxUnavailable)
			}
		}
		for _, w := range m.workloads(t) {
			if isAlone := w.isJob() || is(w.replicas, 1); budgets[component(w)] == isAlone {
				t.Errorf("%s has a disruption budget: %t", w, budgets[component(w)])
			}
		}
	})
}

func TestImageIsNamedInOnePlace(t *testing.T) {
	eachWorkload(t, func(t *testing.T, m *manifest, w workload) {
		want := map[string]string{"base": "stampede:dev", "example": "registry.example.com/stampede:v1.0.0"}[m.name]
		if w.Image != want {
			t.Errorf("it runs %s, want %s", w.Image, want)
		}
	})
	named := 0
	files, err := filepath.Glob(filepath.Join(folder, "*", "*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		named += strings.Count(program.Read(t, file), " image:")
	}
	if named != 1 {
		t.Errorf("%d files name the image of a container, want only base/pod.yaml", named)
	}
}

var named = regexp.MustCompile(`(deployment/|statefulset/|component=|hpa )(?:stampede-)?(\S+)`)

// The runbook's shell names objects that exist, and runs commands with the settings that they need.
func TestShellOfRunbook(t *testing.T) {
	m, shell := render(t, "example"), program.Shell(t, "Kubernetes")
	kinds := map[string]bool{}
	for _, found := range named.FindAllStringSubmatch(shell, -1) {
		switch kind, name := found[1], "stampede-"+found[2]; kind {
		case "deployment/":
			one[*appsv1.Deployment](t, m, name)
		case "statefulset/", "component=":
			one[*appsv1.StatefulSet](t, m, name)
		case "hpa ":
			one[*autoscalingv2.HorizontalPodAutoscaler](t, m, name)
		}
		kinds[found[1]] = true
	}
	if namespace := one[*corev1.Namespace](t, m, "stampede"); len(kinds) != 4 ||
		!strings.Contains(shell, "--namespace="+namespace.Name+"\n") ||
		!strings.Contains(shell, "deployment/stampede-dashboard -- /stampede'") {
		t.Errorf("it does not run commands in the dashboard, or names only %v", kinds)
	}
	for _, w := range m.workloads(t) {
		for _, name := range []string{"REDIS_URL", "DATABASE_URL", "STAMPEDE_PARTITIONS", "STAMPEDE_SCRAPE"} {
			if _, ok := m.settings(t, w)[name]; component(w) == "dashboard" && !ok {
				t.Errorf("its commands run without %s", name)
			}
		}
	}
}

var literal = regexp.MustCompile(`--from-(?:literal|file)=([a-z-]+)=`)

// Secrets are made by their owner, with the command in README.md, and never by these manifests.
func TestSecretsAreReferencesThatAreDocumented(t *testing.T) {
	readme := program.Read(t, folder+"/README.md")
	both(t, func(t *testing.T, m *manifest) {
		if secrets := all[*corev1.Secret](m); len(secrets) > 0 {
			t.Errorf("the manifests hold %v", secrets)
		}
		used, names := map[string]bool{}, map[string]bool{}
		for _, w := range m.workloads(t) {
			if file := m.settings(t, w)["STAMPEDE_OPERATORS_FILE"]; file != "" {
				secret, key := w.mounted(t, file)
				used[key], names[secret] = true, true
			}
			for _, v := range w.Env {
				if v.ValueFrom == nil || v.ValueFrom.SecretKeyRef == nil {
					if isSecret.MatchString(v.Name) {
						t.Errorf("%s: %s is not a reference", w, v.Name)
					}
					continue
				}
				ref := v.ValueFrom.SecretKeyRef
				used[ref.Key], names[ref.Name] = true, true
			}
		}
		program.RequireDocumented(t, readme, literal, used)
		for name := range names {
			if !strings.Contains(readme, "create secret generic "+name+" ") {
				t.Errorf("README.md does not create the secret %s", name)
			}
		}
		for _, o := range all[*corev1.ConfigMap](m) {
			for name := range o.Data {
				if isSecret.MatchString(name) {
					t.Errorf("%s holds %s", o.Name, name)
				}
			}
		}
	})
}

var isSecret = regexp.MustCompile(`^(REDIS_URL|DATABASE_URL|STAMPEDE_.*_(SECRET|TOKEN))$`)

// workerMetric is the metric that scales workers.
func (m *manifest) workerMetric(t *testing.T) string {
	t.Helper()
	worker := one[*autoscalingv2.HorizontalPodAutoscaler](t, m, "stampede-worker")
	return worker.Spec.Metrics[0].External.Metric.Name
}

// The rule of README.md is in a file of its own, which prometheus-adapter takes.
func TestAdapterServesTheMetricOfTheAutoscaler(t *testing.T) {
	rules, name := program.Read(t, folder+"/prometheus-adapter.yaml"), render(t, "base").workerMetric(t)
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

// Each variable is one that the command of its container reads.
func TestVariablesAreThoseOfTheCommand(t *testing.T) {
	eachWorkload(t, func(t *testing.T, m *manifest, w workload) {
		program.RequireVariables(t, w.Args, m.settings(t, w))
	})
}
