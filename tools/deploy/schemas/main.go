// Command schemas writes the JSON schemas of the Kubernetes objects that deploy/kubernetes uses, from the API
// description in a release of Kubernetes: go -C tools/deploy run ./schemas > FILE. Only what these kinds refer to is
// kept, without descriptions, and unknown fields are refused.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// release is the oldest one that the manifests support: Kubernetes only adds fields to these versions of its API.
const release = "v1.30.14"

// kinds are the objects by the file of the API that describes them.
var kinds = map[string][]string{
	"api__v1":                     {"Namespace", "Service", "ServiceAccount", "ConfigMap"},
	"apis__apps__v1":              {"Deployment", "StatefulSet"},
	"apis__autoscaling__v2":       {"HorizontalPodAutoscaler"},
	"apis__batch__v1":             {"Job"},
	"apis__networking.k8s.io__v1": {"Ingress", "NetworkPolicy"},
	"apis__policy__v1":            {"PodDisruptionBudget"},
}

// quantity is what Kubernetes parses as an amount, such as 500m or 512Mi. Its own schema allows any string.
const quantity = `^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]+)?$`

const prefix = "#/components/schemas/"

type object = map[string]any

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "schemas:", err)
		os.Exit(1)
	}
}

func run() error {
	out, err := exec.Command("go", "mod", "download", "-json", "k8s.io/kubernetes@"+release).Output()
	if err != nil {
		return fmt.Errorf("go mod download: %w", err)
	}
	var module struct{ Dir string }
	if err := json.Unmarshal(out, &module); err != nil {
		return err
	}
	index, definitions := object{}, object{}
	for file, names := range kinds {
		if err := collect(filepath.Join(module.Dir, "api/openapi-spec/v3", file+"_openapi.json"), names, index,
			definitions); err != nil {
			return err
		}
	}
	return write(os.Stdout, index, definitions)
}

// write writes a definition a line, so that a newer release makes a difference that can be read.
func write(w io.Writer, index, definitions object) error {
	kinds, err := json.Marshal(index)
	if err != nil {
		return err
	}
	const header = `{
"$comment": "Copyright The Kubernetes Authors, Apache-2.0. By tools/deploy/schemas from Kubernetes %s.",
"$schema": "https://json-schema.org/draft/2020-12/schema",
"kinds": %s,
"$defs": {
`
	text := fmt.Appendf(nil, header, release, kinds)
	for i, name := range slices.Sorted(maps.Keys(definitions)) {
		definition, err := json.Marshal(definitions[name])
		if err != nil {
			return err
		}
		if i > 0 {
			text = append(text, ",\n"...)
		}
		text = fmt.Appendf(text, "%q: %s", name, definition)
	}
	_, err = w.Write(append(text, "\n}}\n"...))
	return err
}

// collect adds the schemas of the named kinds, and all to which they refer.
func collect(file string, names []string, index, definitions object) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var api struct {
		Components struct{ Schemas map[string]object }
	}
	if err := json.Unmarshal(text, &api); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	var add func(name string)
	add = func(name string) {
		if definitions[name] != nil {
			return
		}
		definitions[name] = object{} // it may refer to itself
		definitions[name] = trim(api.Components.Schemas[name], add)
	}
	for _, kind := range names {
		name, version := find(api.Components.Schemas, kind)
		if name == "" {
			return fmt.Errorf("%s describes no %s", file, kind)
		}
		add(name)
		index[version+" "+kind] = "#/$defs/" + name
	}
	return nil
}

// find returns the schema of a kind, and the apiVersion that an object of it has.
func find(schemas map[string]object, kind string) (name, version string) {
	for name, schema := range schemas {
		versions, _ := schema["x-kubernetes-group-version-kind"].([]any)
		if len(versions) != 1 {
			continue
		}
		is, _ := versions[0].(object)
		if is["kind"] != kind {
			continue
		}
		return name, strings.TrimPrefix(fmt.Sprintf("%v/%v", is["group"], is["version"]), "/")
	}
	return "", ""
}

// trim returns what restricts a value, and reports the schemas to which it refers.
func trim(schema object, refersTo func(string)) object {
	if ref, ok := schema["$ref"].(string); ok {
		name := strings.TrimPrefix(ref, prefix)
		refersTo(name)
		return object{"$ref": "#/$defs/" + name}
	}
	if all, ok := schema["allOf"].([]any); ok && len(all) == 1 { // a $ref with a default beside it
		return trim(all[0].(object), refersTo)
	}
	kept := object{}
	for _, key := range []string{"type", "required", "enum", "minimum", "maximum", "pattern"} {
		if schema[key] != nil {
			kept[key] = schema[key]
		}
	}
	if one, ok := schema["oneOf"].([]any); ok { // a number or a string
		kept["oneOf"] = one
		if schema["format"] == nil {
			kept["pattern"] = quantity
		}
	}
	if items, ok := schema["items"].(object); ok {
		kept["items"] = trim(items, refersTo)
	}
	if values, ok := schema["additionalProperties"].(object); ok {
		kept["additionalProperties"] = trim(values, refersTo)
	}
	if properties, ok := schema["properties"].(object); ok {
		trimmed := object{}
		for name, property := range properties {
			trimmed[name] = trim(property.(object), refersTo)
		}
		kept["properties"], kept["additionalProperties"] = trimmed, false
	}
	return kept
}
