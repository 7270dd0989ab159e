// Package kubernetes checks deploy/kubernetes: it renders the manifests as kustomize does, holds them against the
// types of Kubernetes, the documentation and the program, and runs the program as they say. It is in a module of its
// own, so that the main module does not depend on kustomize.
package kubernetes

import (
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"path/filepath"
	"strings"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"

	"stampede/tools/deploy/program"
)

func TestMain(m *testing.M) { program.Main(m) }

const folder = program.Root + "/deploy/kubernetes"

// kinds are the types of the objects. go.mod has the version of k8s.io/api that belongs to the oldest Kubernetes that
// the manifests support: later ones only add fields to these types.
var kinds = runtime.NewScheme()

func init() {
	for _, add := range []func(*runtime.Scheme) error{
		corev1.AddToScheme, appsv1.AddToScheme, batchv1.AddToScheme, autoscalingv2.AddToScheme,
		networkingv1.AddToScheme, policyv1.AddToScheme, gatewayv1.Install, monitoringv1.AddToScheme,
	} {
		if err := add(kinds); err != nil {
			panic(err)
		}
	}
}

// object is a pointer to one of the types.
type object interface {
	metav1.Object
	runtime.Object
}

// decode is strict: what Kubernetes would drop silently is an error, and so is a required field without a value.
func decode(text []byte) (object, error) {
	var given map[string]any
	if err := json.Unmarshal(text, &given); err != nil {
		return nil, err
	}
	o, err := kinds.New(schema.FromAPIVersionAndKind(fmt.Sprint(given["apiVersion"]), fmt.Sprint(given["kind"])))
	if err != nil {
		return nil, err
	}
	unknown, err := kjson.UnmarshalStrict(text, o)
	if err := errors.Join(append(unknown, err)...); err != nil {
		return nil, err
	}
	again, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	var whole map[string]any
	if err := json.Unmarshal(again, &whole); err != nil {
		return nil, err
	}
	return o.(object), requireFields("", whole, given)
}

// requireFields compares an object with what was given for it. A field that may be left out is written only if it has a
// value, or is a group of fields.
func requireFields(at string, whole, given any) (err error) {
	switch whole := whole.(type) {
	case map[string]any:
		given, _ := given.(map[string]any)
		for name, value := range whole {
			_, isGroup := value.(map[string]any)
			if inner, isGiven := given[name]; isGiven {
				err = errors.Join(err, requireFields(at+"."+name, value, inner))
			} else if !isGroup && name != "creationTimestamp" { // which Kubernetes sets
				err = errors.Join(err, fmt.Errorf("%s.%s is missing", at, name))
			}
		}
	case []any:
		for i, value := range whole {
			err = errors.Join(err, requireFields(fmt.Sprintf("%s[%d]", at, i), value, given.([]any)[i]))
		}
	}
	return err
}

// manifest is one rendered folder.
type manifest struct {
	name    string
	objects []object
}

func render(t *testing.T, name string) *manifest {
	t.Helper()
	resources, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(),
		filepath.Join(folder, name))
	if err != nil {
		t.Fatal(err)
	}
	m := &manifest{name: name}
	for _, resource := range resources.Resources() {
		text, err := resource.MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		o, err := decode(text)
		if err != nil {
			t.Fatalf("%s %s: %v", resource.GetKind(), resource.GetName(), err)
		}
		m.objects = append(m.objects, o)
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

// eachWorkload runs a test on each workload of both.
func eachWorkload(t *testing.T, test func(t *testing.T, m *manifest, w workload)) {
	t.Helper()
	both(t, func(t *testing.T, m *manifest) {
		for _, w := range m.workloads(t) {
			t.Run(w.GetName(), func(t *testing.T) { test(t, m, w) })
		}
	})
}

// all returns the objects of a type.
func all[T object](m *manifest) (found []T) {
	for _, o := range m.objects {
		if typed, ok := o.(T); ok {
			found = append(found, typed)
		}
	}
	return found
}

// one returns the object of a type with a name, which must exist.
func one[T object](t *testing.T, m *manifest, name string) T {
	t.Helper()
	for _, o := range all[T](m) {
		if o.GetName() == name {
			return o
		}
	}
	var none T
	t.Fatalf("there is no %T %s", none, name)
	return none
}

// component is the part of the program to which an object belongs.
func component(o metav1.Object) string { return o.GetLabels()["app.kubernetes.io/component"] }

// workload is an object that makes pods of one container.
type workload struct {
	object
	selector *metav1.LabelSelector // nil for a Job
	replicas *int32                // nil if something else owns the number
	pod      corev1.PodTemplateSpec
	corev1.Container
}

func (m *manifest) workloads(t *testing.T) (found []workload) {
	t.Helper()
	for _, o := range m.objects {
		w := workload{object: o}
		switch o := o.(type) {
		case *appsv1.Deployment:
			w.selector, w.replicas, w.pod = o.Spec.Selector, o.Spec.Replicas, o.Spec.Template
		case *appsv1.StatefulSet:
			w.selector, w.replicas, w.pod = o.Spec.Selector, o.Spec.Replicas, o.Spec.Template
		case *batchv1.Job:
			w.pod = o.Spec.Template
		default:
			continue
		}
		if len(w.pod.Spec.Containers) != 1 || len(w.pod.Spec.InitContainers) > 0 {
			t.Fatalf("%s has %d containers, want one", w, len(w.pod.Spec.Containers))
		}
		w.Container = w.pod.Spec.Containers[0]
		found = append(found, w)
	}
	return found
}

func (w workload) isJob() bool { return w.selector == nil }

func (w workload) String() string { return w.GetName() }

// port returns the number of a port, given by name or number.
func (w workload) port(named intstr.IntOrString) (int32, error) {
	for _, p := range w.Ports {
		if p.Name == named.String() || fmt.Sprint(p.ContainerPort) == named.String() {
			return p.ContainerPort, nil
		}
	}
	return 0, fmt.Errorf("the container has no port %s, only %v", named.String(), w.Ports)
}

// mounted returns the secret and the key that a container sees as a file. Its pods may read it.
func (w workload) mounted(t *testing.T, file string) (secret, key string) {
	t.Helper()
	for _, mount := range w.VolumeMounts {
		for _, volume := range w.pod.Spec.Volumes {
			from := volume.Secret
			if mount.Name == volume.Name && mount.MountPath == path.Dir(file) && mount.SubPath == "" && from != nil {
				if !is(from.DefaultMode, 0o440) || !is(w.pod.Spec.SecurityContext.FSGroup, 65532) {
					t.Errorf("%s: its user cannot read %s, or others can", w, file)
				}
				return from.SecretName, path.Base(file)
			}
		}
	}
	t.Fatalf("%s: no secret is mounted at %s", w, file)
	return "", ""
}

// settings returns the environment of a container, with its ConfigMaps, as far as the manifests have values.
func (m *manifest) settings(t *testing.T, w workload) map[string]string {
	t.Helper()
	values := map[string]string{}
	for _, from := range w.EnvFrom {
		for name, value := range one[*corev1.ConfigMap](t, m, from.ConfigMapRef.Name).Data {
			values[name] = value
		}
	}
	for _, v := range w.Env {
		values[v.Name] = v.Value
	}
	return values
}

func matches(t *testing.T, s *metav1.LabelSelector, pod map[string]string) bool {
	t.Helper()
	selector, err := metav1.LabelSelectorAsSelector(s)
	if err != nil {
		t.Fatal(err)
	}
	return selector.Matches(labels.Set(pod))
}

func TestMistakesAreRefused(t *testing.T) {
	deployment, err := json.Marshal(all[*appsv1.Deployment](render(t, "base"))[0])
	if err != nil {
		t.Fatal(err)
	}
	for name, mistake := range map[string]func(spec, pod, container map[string]any){
		"unknown field of the spec":     func(spec, _, _ map[string]any) { spec["replica"] = 2 },
		"unknown field of the pod":      func(_, pod, _ map[string]any) { pod["terminationGracePeriod"] = 30 },
		"misspelt probe":                func(_, _, c map[string]any) { c["readynessProbe"] = map[string]any{} },
		"amount with a wrong unit":      func(_, _, c map[string]any) { limits(c)["memory"] = "512MB" },
		"missing name of the container": func(_, _, c map[string]any) { delete(c, "name") },
		"number in place of a text":     func(_, _, c map[string]any) { c["args"] = []any{8080} },
		"missing selector":              func(spec, _, _ map[string]any) { delete(spec, "selector") },
		"":                              func(_, _, _ map[string]any) {},
	} {
		var raw map[string]any
		if err := json.Unmarshal(deployment, &raw); err != nil {
			t.Fatal(err)
		}
		spec := raw["spec"].(map[string]any)
		pod := spec["template"].(map[string]any)["spec"].(map[string]any)
		mistake(spec, pod, pod["containers"].([]any)[0].(map[string]any))
		text, err := json.Marshal(raw)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := decode(text); (err == nil) != (name == "") {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func limits(container map[string]any) map[string]any {
	return container["resources"].(map[string]any)["limits"].(map[string]any)
}

// Kubernetes checks names when an object is created, and its types do not.
func TestNamesAreThoseOfStampede(t *testing.T) {
	both(t, func(t *testing.T, m *manifest) {
		if len(m.objects) < 20 {
			t.Errorf("%d objects are rendered", len(m.objects))
		}
		for _, o := range m.objects {
			name := o.GetName()
			if !strings.HasPrefix(name, "stampede") || strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" ||
				len(name) > 52 {
				t.Errorf("%s has another name than the rest, or one that Kubernetes refuses", name)
			}
			if o.GetLabels()["app.kubernetes.io/name"] != "stampede" {
				t.Errorf("%s has the labels %v", name, o.GetLabels())
			}
		}
	})
}
