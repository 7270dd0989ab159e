package kubernetes

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// validator holds objects against the schemas of Kubernetes, in testdata/schemas.json.
type validator struct {
	compiler *jsonschema.Compiler
	kinds    map[string]any
}

func newValidator(t *testing.T) *validator {
	t.Helper()
	file, err := os.Open("testdata/schemas.json")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	schemas, err := jsonschema.UnmarshalJSON(file)
	if err != nil {
		t.Fatal(err)
	}
	compiler := jsonschema.NewCompiler()
	if err := compiler.AddResource("schemas.json", schemas); err != nil {
		t.Fatal(err)
	}
	return &validator{compiler, schemas.(map[string]any)["kinds"].(map[string]any)}
}

func (v *validator) validate(raw map[string]any) error {
	kind := fmt.Sprintf("%v %v", raw["apiVersion"], raw["kind"])
	at, ok := v.kinds[kind].(string)
	if !ok {
		return fmt.Errorf("there is no schema for %s: add it to tools/deploy/schemas", kind)
	}
	schema, err := v.compiler.Compile("schemas.json" + at)
	if err != nil {
		return err
	}
	return schema.Validate(raw)
}

func TestObjectsMatchSchemas(t *testing.T) {
	v := newValidator(t)
	both(t, func(t *testing.T, m *manifest) {
		if len(m.raw) < 20 {
			t.Errorf("%d objects are rendered", len(m.raw))
		}
		for i, raw := range m.raw {
			if err := v.validate(raw); err != nil {
				t.Errorf("%s: %v", m.objects[i], err)
			}
		}
	})
}

// The schemas are strict: what Kubernetes would drop silently is refused.
func TestSchemasRefuseMistakes(t *testing.T) {
	v := newValidator(t)
	for name, mistake := range map[string]func(spec, pod, container map[string]any){
		"unknown field of the spec":     func(spec, _, _ map[string]any) { spec["replica"] = 2 },
		"unknown field of the pod":      func(_, pod, _ map[string]any) { pod["terminationGracePeriod"] = 30 },
		"misspelt probe":                func(_, _, c map[string]any) { c["readynessProbe"] = map[string]any{} },
		"amount with a wrong unit":      func(_, _, c map[string]any) { limits(c)["memory"] = "512MB" },
		"missing name of the container": func(_, _, c map[string]any) { delete(c, "name") },
		"number in place of a text":     func(_, _, c map[string]any) { c["args"] = []any{8080} },
		"missing selector":              func(spec, _, _ map[string]any) { delete(spec, "selector") },
	} {
		t.Run(name, func(t *testing.T) {
			m := render(t, "base")
			for i, o := range m.objects {
				if o.Kind != "Deployment" {
					continue
				}
				spec := m.raw[i]["spec"].(map[string]any)
				pod := spec["template"].(map[string]any)["spec"].(map[string]any)
				mistake(spec, pod, pod["containers"].([]any)[0].(map[string]any))
				if err := v.validate(m.raw[i]); err == nil {
					t.Error("it is accepted")
				}
				return
			}
		})
	}
}

func limits(container map[string]any) map[string]any {
	return container["resources"].(map[string]any)["limits"].(map[string]any)
}

// Kubernetes checks names when an object is created, and its schemas do not.
func TestNamesAreThoseOfStampede(t *testing.T) {
	both(t, func(t *testing.T, m *manifest) {
		for _, o := range m.objects {
			if !strings.HasPrefix(o.Metadata.Name, "stampede") || strings.Trim(o.Metadata.Name,
				"abcdefghijklmnopqrstuvwxyz0123456789-") != "" || len(o.Metadata.Name) > 52 {
				t.Errorf("%s has another name than the rest, or one that Kubernetes refuses", o)
			}
			if o.Metadata.Labels["app.kubernetes.io/name"] != "stampede" {
				t.Errorf("%s has the labels %v", o, o.Metadata.Labels)
			}
		}
	})
}
