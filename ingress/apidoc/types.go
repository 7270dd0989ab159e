package apidoc

import (
	"strings"
)

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
