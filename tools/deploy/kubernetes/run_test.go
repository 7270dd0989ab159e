package kubernetes

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"stampede/tools/deploy/program"
)

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
