// Package kubernetes checks deploy/kubernetes: it renders the manifests as kustomize does, holds them against the
// schemas of Kubernetes, the documentation and the program, and runs the program as they say. It is in a module of its
// own, so that the main module does not depend on kustomize.
package kubernetes

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"

	"stampede/tools/deploy/program"
)

func TestMain(m *testing.M) { program.Main(m) }

const folder = program.Root + "/deploy/kubernetes"

// manifest is one rendered folder.
type manifest struct {
	objects []object
	// raw has the same objects as they are in JSON.
	raw []map[string]any
}

// object has the fields of all kinds that the tests look at.
type object struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Metadata   struct {
		Name      string            `json:"name"`
		Namespace string            `json:"namespace"`
		Labels    map[string]string `json:"labels"`
	} `json:"metadata"`
	Data map[string]string `json:"data"`
	Spec struct {
		Replicas *int            `json:"replicas"`
		Selector json.RawMessage `json:"selector"`
		Template template        `json:"template"`
		// Of a StatefulSet.
		ServiceName string `json:"serviceName"`
		// Of a Deployment.
		Strategy struct {
			RollingUpdate struct {
				MaxUnavailable any `json:"maxUnavailable"`
			} `json:"rollingUpdate"`
		} `json:"strategy"`
		// Of a Service.
		ClusterIP string `json:"clusterIP"`
		Ports     []struct {
			Name       string `json:"name"`
			Port       any    `json:"port"`
			TargetPort any    `json:"targetPort"`
		} `json:"ports"`
		// Of an autoscaler.
		ScaleTargetRef struct {
			Kind string `json:"kind"`
			Name string `json:"name"`
		} `json:"scaleTargetRef"`
		MinReplicas int `json:"minReplicas"`
		MaxReplicas int `json:"maxReplicas"`
		Metrics     []struct {
			Type     string `json:"type"`
			External struct {
				Metric struct {
					Name string `json:"name"`
				} `json:"metric"`
			} `json:"external"`
		} `json:"metrics"`
		// Of a disruption budget.
		MaxUnavailable any `json:"maxUnavailable"`
		// Of a network policy.
		PodSelector selector `json:"podSelector"`
		PolicyTypes []string `json:"policyTypes"`
		Ingress     []rule   `json:"ingress"`
		Egress      []rule   `json:"egress"`
		// Of an Ingress.
		Rules []struct {
			HTTP struct {
				Paths []struct {
					Path    string `json:"path"`
					Backend struct {
						Service struct {
							Name string `json:"name"`
							Port struct {
								Name string `json:"name"`
							} `json:"port"`
						} `json:"service"`
					} `json:"backend"`
				} `json:"paths"`
			} `json:"http"`
		} `json:"rules"`
	} `json:"spec"`
}

type template struct {
	Metadata struct {
		Labels      map[string]string `json:"labels"`
		Annotations map[string]string `json:"annotations"`
	} `json:"metadata"`
	Spec podSpec `json:"spec"`
}

type podSpec struct {
	AutomountServiceAccountToken *bool       `json:"automountServiceAccountToken"`
	RestartPolicy                string      `json:"restartPolicy"`
	GracePeriodSeconds           int         `json:"terminationGracePeriodSeconds"`
	Containers                   []container `json:"containers"`
	InitContainers               []container `json:"initContainers"`
	HostNetwork                  bool        `json:"hostNetwork"`
	SecurityContext              struct {
		RunAsNonRoot   bool `json:"runAsNonRoot"`
		RunAsUser      int  `json:"runAsUser"`
		SeccompProfile struct {
			Type string `json:"type"`
		} `json:"seccompProfile"`
	} `json:"securityContext"`
	TopologySpreadConstraints []struct {
		LabelSelector selector `json:"labelSelector"`
	} `json:"topologySpreadConstraints"`
}

type container struct {
	Image   string   `json:"image"`
	Command []string `json:"command"`
	Args    []string `json:"args"`
	Ports   []struct {
		Name          string `json:"name"`
		ContainerPort int    `json:"containerPort"`
	} `json:"ports"`
	EnvFrom []struct {
		ConfigMapRef struct {
			Name string `json:"name"`
		} `json:"configMapRef"`
	} `json:"envFrom"`
	Env            []variable `json:"env"`
	StartupProbe   *probe     `json:"startupProbe"`
	LivenessProbe  *probe     `json:"livenessProbe"`
	ReadinessProbe *probe     `json:"readinessProbe"`
	Resources      struct {
		Requests map[string]string `json:"requests"`
		Limits   map[string]string `json:"limits"`
	} `json:"resources"`
	SecurityContext struct {
		AllowPrivilegeEscalation *bool `json:"allowPrivilegeEscalation"`
		ReadOnlyRootFilesystem   bool  `json:"readOnlyRootFilesystem"`
		Privileged               bool  `json:"privileged"`
		Capabilities             struct {
			Drop []string `json:"drop"`
			Add  []string `json:"add"`
		} `json:"capabilities"`
	} `json:"securityContext"`
}

type variable struct {
	Name      string `json:"name"`
	Value     string `json:"value"`
	ValueFrom struct {
		SecretKeyRef *struct {
			Name     string `json:"name"`
			Key      string `json:"key"`
			Optional bool   `json:"optional"`
		} `json:"secretKeyRef"`
		FieldRef *struct {
			FieldPath string `json:"fieldPath"`
		} `json:"fieldRef"`
	} `json:"valueFrom"`
}

type probe struct {
	HTTPGet struct {
		Path string `json:"path"`
		Port any    `json:"port"`
	} `json:"httpGet"`
	PeriodSeconds    int `json:"periodSeconds"`
	TimeoutSeconds   int `json:"timeoutSeconds"`
	FailureThreshold int `json:"failureThreshold"`
}

func render(t *testing.T, name string) *manifest {
	t.Helper()
	resources, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(),
		filepath.Join(folder, name))
	if err != nil {
		t.Fatal(err)
	}
	m := new(manifest)
	for _, resource := range resources.Resources() {
		text, err := resource.MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		var o object
		var raw map[string]any
		if err := json.Unmarshal(text, &raw); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(text, &o); err != nil {
			t.Fatalf("%v: %v", resource.GetName(), err)
		}
		m.objects, m.raw = append(m.objects, o), append(m.raw, raw)
	}
	return m
}

// both runs a test on the base, and on the example.
func both(t *testing.T, test func(t *testing.T, m *manifest)) {
	t.Helper()
	for _, name := range []string{"base", "example"} {
		t.Run(name, func(t *testing.T) { test(t, render(t, name)) })
	}
}

// of returns the objects of the kinds.
func (m *manifest) of(kinds ...string) (found []object) {
	for _, o := range m.objects {
		if slices.Contains(kinds, o.Kind) {
			found = append(found, o)
		}
	}
	return found
}

// workloads are the objects that make pods.
func (m *manifest) workloads() []object { return m.of("Deployment", "StatefulSet", "Job") }

// one returns the object of a kind and name, which must exist.
func (m *manifest) one(t *testing.T, kind, name string) object {
	t.Helper()
	for _, o := range m.of(kind) {
		if o.Metadata.Name == name {
			return o
		}
	}
	t.Fatalf("there is no %s %s", kind, name)
	return object{}
}

// component is the part of the program that a workload runs.
func (o object) component() string { return o.Metadata.Labels["app.kubernetes.io/component"] }

// container returns the only one of a workload.
func (o object) container(t *testing.T) container {
	t.Helper()
	containers := o.Spec.Template.Spec.Containers
	if len(containers) != 1 || len(o.Spec.Template.Spec.InitContainers) > 0 {
		t.Fatalf("%s has %d containers, want one", o, len(containers))
	}
	return containers[0]
}

func (o object) String() string { return o.Kind + " " + o.Metadata.Name }

// port returns the number of a port, given by name or number.
func (c container) port(named any) (int, error) {
	for _, p := range c.Ports {
		if p.Name == named || float64(p.ContainerPort) == named {
			return p.ContainerPort, nil
		}
	}
	return 0, fmt.Errorf("the container has no port %v, only %v", named, c.Ports)
}

// selector chooses pods by their labels.
type selector struct {
	MatchLabels      map[string]string `json:"matchLabels"`
	MatchExpressions []struct {
		Key      string   `json:"key"`
		Operator string   `json:"operator"`
		Values   []string `json:"values"`
	} `json:"matchExpressions"`
}

func (s selector) matches(labels map[string]string) bool {
	for key, value := range s.MatchLabels {
		if labels[key] != value {
			return false
		}
	}
	for _, e := range s.MatchExpressions {
		if e.Operator != "In" || !slices.Contains(e.Values, labels[e.Key]) {
			return false
		}
	}
	return true
}
