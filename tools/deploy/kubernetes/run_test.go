package kubernetes

import (
	"fmt"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"stampede/tools/deploy/program"
)

// secretValues stand for the secret of an installation.
func secretValues(servers program.Servers) map[string]string {
	return map[string]string{
		"redis-url-ingress":     servers.RedisURL,
		"redis-url-worker":      servers.RedisURL,
		"redis-url-operator":    servers.RedisURL,
		"database-url-migrator": servers.DatabaseURL,
		"database-url-ingress":  servers.DatabaseURL,
		"database-url-worker":   servers.DatabaseURL,
		"database-url-relay":    servers.DatabaseURL,
		"database-url-desk":     servers.DatabaseURL,
		"admin-token":           "token-of-the-tests",
		"jwt-secret":            "a secret of the tests, 32 bytes or more",
	}
}

// inContainer is what the container of a workload gets: its environment, and a free port for each of its own.
type inContainer struct {
	env   []string
	ports map[int]string
}

func (m *manifest) inContainer(t *testing.T, o object, secrets map[string]string) inContainer {
	t.Helper()
	c := o.container(t)
	// The root file system is read-only, and there is no folder for temporary files.
	in := inContainer{env: []string{"TMPDIR=/nonexistent"}, ports: map[int]string{}}
	for _, p := range c.Ports {
		in.ports[p.ContainerPort] = program.FreePort(t)
	}
	values := m.settings(t, c)
	for _, v := range c.Env {
		switch from := v.ValueFrom; {
		case from.FieldRef != nil:
			values[v.Name] = o.Metadata.Name + "-0"
		case from.SecretKeyRef != nil:
			value, ok := secrets[from.SecretKeyRef.Key]
			if ok {
				values[v.Name] = value
			} else if delete(values, v.Name); !from.SecretKeyRef.Optional {
				t.Fatalf("%s: the secret has no %s", o, from.SecretKeyRef.Key)
			}
		}
	}
	for name, value := range values {
		// The address of a port on all interfaces, which on this host may be taken.
		if port, err := strconv.Atoi(strings.TrimPrefix(value, ":")); err == nil && strings.HasPrefix(value, ":") {
			if in.ports[port] == "" {
				t.Errorf("%s: %s=%s is no port of the container", o, name, value)
			}
			value = "127.0.0.1:" + in.ports[port]
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
	secrets := secretValues(servers)
	for _, o := range m.workloads() {
		t.Run(o.Metadata.Name, func(t *testing.T) {
			t.Parallel()
			c, in := o.container(t), m.inContainer(t, o, secrets)
			began := time.Now()
			p := program.Run(t, c.Args, in.env)
			if o.Kind == "Job" {
				if err := p.Wait(); err != nil {
					t.Errorf("%v: %s", err, p.Output())
				}
				return
			}
			ask := func(probe *probe, want int) {
				t.Helper()
				port, err := c.port(probe.HTTPGet.Port)
				if err != nil {
					t.Fatal(err)
				}
				p.Answer(fmt.Sprintf("http://127.0.0.1:%s%s", in.ports[port], probe.HTTPGet.Path), want)
			}
			ask(c.StartupProbe, http.StatusOK)
			ask(c.ReadinessProbe, http.StatusOK)
			ask(c.LivenessProbe, http.StatusOK)
			t.Logf("ready after %v", time.Since(began))
			if o.Spec.Template.Metadata.Annotations["prometheus.io/scrape"] == "true" {
				port, err := strconv.Atoi(o.Spec.Template.Metadata.Annotations["prometheus.io/port"])
				if err != nil {
					t.Fatal(err)
				}
				metrics := p.Answer("http://127.0.0.1:"+in.ports[port]+"/metrics", http.StatusOK)
				if o.component() == "worker" {
					checkMetricOfAutoscaler(t, m, metrics)
				}
			}
			grace := time.Duration(o.Spec.Template.Spec.GracePeriodSeconds) * time.Second
			t.Logf("ended %v after SIGTERM, of %v", p.Stop(grace), grace)
			if err := p.Wait(); err != nil {
				t.Errorf("it ends with %v:\n%s", err, p.Output())
			}
		})
	}
}

// checkMetricOfAutoscaler looks for the metric by which workers are scaled, with the label of its rule.
func checkMetricOfAutoscaler(t *testing.T, m *manifest, metrics string) {
	t.Helper()
	for _, hpa := range m.of("HorizontalPodAutoscaler") {
		if hpa.Spec.Metrics[0].Type != "External" {
			continue
		}
		name := hpa.Spec.Metrics[0].External.Metric.Name
		if !regexp.MustCompile(`(?m)^` + name + `\{.*stream="`).MatchString(metrics) {
			t.Errorf("a worker has no %s with a stream:\n%s", name, metrics)
		}
	}
}
