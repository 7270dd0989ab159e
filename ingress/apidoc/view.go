package apidoc

import (
	"bytes"
	"encoding/json"
	"fmt"
	"html/template"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/yuin/goldmark"
)

// docsView is the page of the description.
type docsView struct {
	Title, Version string
	Intro          template.HTML
	Groups         []groupView
	Webhooks       []operationView
	Security       []securityView
	Schemas        []schemaView
	Problems       []problemView
}

// groupView is a tag with its operations.
type groupView struct {
	Name       string
	Intro      template.HTML
	Operations []operationView
}

type operationView struct {
	ID, Method, Path, Summary string
	Intro                     template.HTML
	Security                  []proofView
	// Anonymous calls may do without.
	Anonymous  bool
	Parameters []memberView
	Body       *bodyView
	Responses  []responseView
}

type bodyView struct {
	Required bool
	Intro    template.HTML
	Contents []contentView
}

// contentView is a media type with the schemas of its bodies.
type contentView struct {
	Type    string
	Schemas []typeView
	// Events is the schema of the data of each event.
	Events *typeView
}

type responseView struct {
	Status   string
	Text     string
	Intro    template.HTML
	Headers  []memberView
	Contents []contentView
	Problems []problemView
}

// memberView is a parameter, a header, or a member of an object. In is where a parameter is, and how often a header is
// in answers.
type memberView struct {
	Name, In string
	Required bool
	Type     typeView
	Intro    template.HTML
}

// typeView says what a value is. Ref is the schema that says more, or empty.
type typeView struct{ Ref, Text string }

// proofView is a way to prove who makes a call, and the lowest role that may, if there are roles.
type proofView struct{ Scheme, Role string }

type securityView struct {
	ID, Text string
	Intro    template.HTML
}

type schemaView struct {
	Name    string
	Intro   template.HTML
	Type    typeView
	Members []memberView
	Example string
}

type problemView struct {
	Slug, Type, Title    string
	Status               int
	StatusText           string
	Happened, Done, Todo template.HTML
	Members              []memberView
	Example              string
	happened, done, todo string
	schema               string
}

var methods = []string{"get", "post", "put", "patch", "delete"}

func newDocsView(doc document) (*docsView, error) {
	v := &docsView{
		Title: doc.get("info", "title").text(), Version: doc.get("info", "version").text(),
		Intro: markdown(doc.get("info", "description").text()),
	}
	bySchema := map[string]problemView{}
	for _, schema := range doc.get("components", "schemas").members() {
		if !strings.HasPrefix(schema.get("properties", "type", "const").text(), problemPath) {
			view, err := newSchemaView(schema)
			if err != nil {
				return nil, err
			}
			v.Schemas = append(v.Schemas, view)
			continue
		}
		p, err := newProblemView(schema)
		if err != nil {
			return nil, err
		}
		v.Problems = append(v.Problems, p)
		bySchema[p.schema] = p
	}
	for _, tag := range doc.get("tags").items() {
		group := groupView{Name: tag.get("name").text(), Intro: markdown(tag.get("description").text())}
		for _, path := range doc.get("paths").members() {
			for _, o := range newOperations(path, bySchema) {
				if o.tag == group.Name {
					group.Operations = append(group.Operations, o.operationView)
				}
			}
		}
		v.Groups = append(v.Groups, group)
	}
	for _, hook := range doc.get("webhooks").members() {
		for _, o := range newOperations(hook, bySchema) {
			v.Webhooks = append(v.Webhooks, o.operationView)
		}
	}
	for _, scheme := range doc.get("components", "securitySchemes").members() {
		text := "Authorization: Bearer …"
		if name := scheme.get("name").text(); name != "" {
			text = name + ": …"
		}
		v.Security = append(v.Security, securityView{scheme.name, text, markdown(scheme.get("description").text())})
	}
	return v, nil
}

type taggedOperation struct {
	operationView
	tag string
}

func newOperations(path member, problems map[string]problemView) (operations []taggedOperation) {
	for _, m := range path.members() {
		if !slices.Contains(methods, m.name) {
			continue
		}
		o := operationView{
			ID: m.get("operationId").text(), Method: strings.ToUpper(m.name), Path: path.name,
			Summary: m.get("summary").text(), Intro: markdown(m.get("description").text()),
		}
		for _, alternative := range m.get("security").items() {
			schemes := alternative.members()
			for _, scheme := range schemes {
				proof := proofView{Scheme: scheme.name}
				for _, role := range scheme.items() {
					proof.Role = role.text()
				}
				o.Security = append(o.Security, proof)
			}
			o.Anonymous = o.Anonymous || len(schemes) == 0
		}
		for _, p := range append(path.get("parameters").items(), m.get("parameters").items()...) {
			o.Parameters = append(o.Parameters, memberView{
				Name: p.get("name").text(), In: p.get("in").text(), Required: p.get("required").text() == "true",
				Type: newTypeView(p.get("schema")), Intro: markdown(p.get("description").text()),
			})
		}
		if body := m.get("requestBody"); body.exists() {
			o.Body = &bodyView{
				Required: body.get("required").text() == "true", Intro: markdown(body.get("description").text()),
				Contents: newContents(body.get("content")),
			}
		}
		for _, r := range m.get("responses").members() {
			o.Responses = append(o.Responses, newResponseView(r, problems))
		}
		operations = append(operations, taggedOperation{o, firstText(m.get("tags"))})
	}
	return operations
}

func firstText(list value) string {
	if all := texts(list); len(all) > 0 {
		return all[0]
	}
	return ""
}

func newResponseView(r member, problems map[string]problemView) responseView {
	status, _ := strconv.Atoi(r.name)
	view := responseView{Status: r.name, Text: http.StatusText(status), Intro: markdown(r.get("description").text())}
	for _, h := range r.get("headers").members() {
		often := "sometimes"
		if h.get("required").text() == "true" {
			often = "always"
		}
		view.Headers = append(view.Headers, memberView{
			Name: h.name, In: often, Type: newTypeView(h.get("schema")), Intro: markdown(h.get("description").text()),
		})
	}
	for _, content := range newContents(r.get("content")) {
		if content.Type != problemType {
			view.Contents = append(view.Contents, content)
			continue
		}
		for _, schema := range content.Schemas {
			view.Problems = append(view.Problems, problems[schema.Ref])
		}
	}
	return view
}

const (
	problemType = "application/problem+json"
	problemPath = "/problems/"
)

func newContents(v value) (contents []contentView) {
	for _, media := range v.members() {
		content := contentView{Type: media.name}
		schema := media.get("schema")
		data := schema.get("properties", "data", "contentSchema")
		if data.exists() {
			events := newTypeView(data)
			content.Events = &events
		} else if alternatives := schema.get("oneOf").items(); alternatives != nil {
			for _, alternative := range alternatives {
				content.Schemas = append(content.Schemas, newTypeView(alternative.value))
			}
		} else {
			content.Schemas = []typeView{newTypeView(schema)}
		}
		contents = append(contents, content)
	}
	return contents
}

func newSchemaView(schema member) (schemaView, error) {
	view := schemaView{
		Name: schema.name, Intro: markdown(schema.get("description").text()), Members: newMembers(schema.value),
	}
	if view.Members == nil {
		view.Type = newTypeView(value{schema.doc, schema.resolve()})
	}
	if examples := schema.get("examples").items(); len(examples) > 0 {
		var err error
		if view.Example, err = indented(examples[0].value); err != nil {
			return view, fmt.Errorf("example of %s: %w", schema.name, err)
		}
	}
	return view, nil
}

// newMembers returns the members of an object, those of the schemas that it extends first. Of a member that is named
// again the later one counts.
func newMembers(schema value) (members []memberView) {
	for _, base := range schema.get("allOf").items() {
		members = append(members, newMembers(base.value)...)
	}
	required := map[string]bool{}
	for _, name := range schema.get("required").items() {
		required[name.text()] = true
	}
	for _, p := range schema.get("properties").members() {
		view := memberView{
			Name: p.name, Required: required[p.name], Type: newTypeView(p.value), Intro: markdown(p.beside("description")),
		}
		if at := slices.IndexFunc(members, func(m memberView) bool { return m.Name == p.name }); at >= 0 {
			view.Required = view.Required || members[at].Required
			members[at] = view
		} else {
			members = append(members, view)
		}
	}
	for i := range members {
		members[i].Required = members[i].Required || required[members[i].Name]
	}
	return members
}

func newProblemView(schema member) (problemView, error) {
	v := problemView{
		Type: schema.get("properties", "type", "const").text(), Title: schema.get("title").text(), schema: schema.name,
		happened: schema.get("description").text(), done: schema.get("x-done").text(), todo: schema.get("x-todo").text(),
	}
	v.Slug = strings.TrimPrefix(v.Type, problemPath)
	v.Happened, v.Done, v.Todo = markdown(v.happened), markdown(v.done), markdown(v.todo)
	var err error
	if v.Status, err = strconv.Atoi(schema.get("properties", "status", "const").text()); err != nil {
		return v, fmt.Errorf("status of %s: %w", schema.name, err)
	}
	v.StatusText = http.StatusText(v.Status)
	for _, m := range newMembers(schema.value) {
		if m.Name != "type" && m.Name != "title" && m.Name != "status" && m.Name != "detail" {
			v.Members = append(v.Members, m)
		}
	}
	examples := schema.get("examples").items()
	if len(examples) == 0 {
		return v, fmt.Errorf("%s has no example", schema.name)
	}
	v.Example, err = indented(examples[0].value)
	return v, err
}

// indented returns a value in JSON.
func indented(v value) (string, error) {
	text, err := appendJSON(nil, v.resolve())
	if err != nil {
		return "", err
	}
	var lines bytes.Buffer
	err = json.Indent(&lines, text, "", "  ")
	return lines.String(), err
}

// markdown renders a description. It leaves raw HTML out.
func markdown(text string) template.HTML {
	var html bytes.Buffer
	if err := goldmark.Convert([]byte(text), &html); err != nil {
		return template.HTML(template.HTMLEscapeString(text)) //nolint:gosec // escaped
	}
	return template.HTML(html.String()) //nolint:gosec // goldmark escapes
}

// newTypeView says in a few words what a schema allows.
func newTypeView(schema value) typeView {
	if ref := schema.ref(); ref != "" {
		return typeView{Ref: ref, Text: ref}
	}
	var words []string
	add := func(text string) {
		if text != "" {
			words = append(words, text)
		}
	}
	switch kind := schema.get("type"); {
	case schema.get("const").exists():
		add(schema.get("const").text())
	case len(kind.items()) > 0:
		add(strings.Join(texts(kind), " or "))
	default:
		add(kind.text())
	}
	if of := schema.get("items"); of.exists() {
		add("of " + newTypeView(of).Text)
	}
	add(strings.Join(texts(schema.get("enum")), ", "))
	add(schema.get("format").text())
	least, most := schema.get("minimum").text(), schema.get("maximum").text()
	switch {
	case least != "" && most != "":
		add(grouped(least) + " to " + grouped(most))
	case least != "":
		add(grouped(least) + " or more")
	}
	if most := schema.get("maxLength").text(); most != "" {
		add("at most " + most + " characters")
	}
	if usual := schema.get("default").text(); usual != "" {
		add("default " + usual)
	}
	return typeView{Text: strings.Join(words, ", ")}
}

func texts(list value) (texts []string) {
	for _, item := range list.items() {
		texts = append(texts, item.text())
	}
	return texts
}

// grouped writes a number with commas between thousands.
func grouped(digits string) string {
	for at := len(digits) - 3; at > 0 && digits[at-1] != '-'; at -= 3 {
		digits = digits[:at] + "," + digits[at:]
	}
	return digits
}
