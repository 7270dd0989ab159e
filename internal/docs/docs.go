// Package docs holds the Markdown of this repository against its code: links, line length, commands,
// flags, environment variables, tasks, problem slugs, metrics, paths and names of Go. It is for tests.
package docs

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/alecthomas/kong"
)

const (
	lineColumnsMax = 100
	// referencePage names every setting and every metric.
	referencePage = "docs/operations.md"
	// problemsPage names every problem slug.
	problemsPage = "docs/http-api.md"
)

// Check reads all Markdown below root and returns what contradicts the code, one line each, with the
// page and its line. The command line is that of the program.
func Check(root string, commands *kong.Application) ([]string, error) {
	files := os.DirFS(root)
	code, err := readCode(files)
	if err != nil {
		return nil, err
	}
	c := &checker{
		code: code, commands: commands, pages: map[string]*page{}, flags: map[string]bool{},
		settings: map[string]bool{},
	}
	c.readCommands(commands.Node)
	for name := range code.files {
		if path.Ext(name) != ".md" {
			continue
		}
		text, err := fs.ReadFile(files, name)
		if err != nil {
			return nil, err
		}
		c.pages[name] = parsePage(name, string(text))
	}
	for _, name := range slices.Sorted(maps.Keys(c.pages)) {
		c.page(c.pages[name])
	}
	c.reference()
	return c.found, nil
}

type checker struct {
	*code
	commands *kong.Application
	pages    map[string]*page
	// flags are those of any command, and settings the environment variables of all that are shown.
	flags    map[string]bool
	settings map[string]bool
	found    []string
}

func (c *checker) report(p *page, line int, format string, args ...any) {
	c.found = append(c.found, fmt.Sprintf("%s:%d: ", p.name, line)+fmt.Sprintf(format, args...))
}

func (c *checker) page(p *page) {
	c.width(p)
	c.links(p)
	c.walks(p)
	for _, code := range p.spans() {
		c.inline(p, code)
	}
	for _, command := range p.shell() {
		c.commandLine(p, command)
	}
	for i, line := range p.lines {
		for _, name := range variable.FindAllString(line, -1) {
			if !c.settings[name] && !c.variables[name] {
				c.report(p, i+1, "no code reads the environment variable %s", name)
			}
		}
	}
}

var url = regexp.MustCompile(`https?://[^\s)]+`)

// width excepts what cannot be wrapped: output, addresses, and tables that a benchmark writes.
func (c *checker) width(p *page) {
	output := map[int]bool{}
	for _, f := range p.fences {
		for i := range f.lines {
			output[f.first+i] = f.language == "console" || f.language == "json"
		}
	}
	for i, line := range p.lines {
		n := utf8.RuneCountInString(url.ReplaceAllString(line, ""))
		isTable := p.generated[i+1] && (strings.HasPrefix(line, "|") || strings.HasPrefix(line, "<!--"))
		if n > lineColumnsMax && !output[i+1] && !isTable {
			c.report(p, i+1, "%d columns, want at most %d", n, lineColumnsMax)
		}
	}
}

func (c *checker) links(p *page) {
	for _, link := range p.links() {
		if strings.Contains(link.text, "://") || strings.HasPrefix(link.text, "mailto:") {
			continue
		}
		target, anchor, _ := strings.Cut(link.text, "#")
		to := p.name
		if target != "" {
			to = path.Join(path.Dir(p.name), target)
		}
		if !c.files[to] {
			c.report(p, link.line, "%s does not exist", link.text)
			continue
		}
		if page := c.pages[to]; page != nil && anchor != "" && !page.anchors[anchor] {
			c.report(p, link.line, "%s: no heading has this anchor", link.text)
		}
	}
}

var (
	isPath      = regexp.MustCompile(`^[\w.*-]+(/[\w.*-]+)*/?$`)
	isTest      = regexp.MustCompile(`^(Test|Benchmark|Fuzz|Example)[A-Z]\w*$`)
	isGoName    = regexp.MustCompile(`^([a-z]+)\.([A-Z]\w*(?:\.[A-Z]\w*)?)(?:\(.*\))?$`)
	isSomeFlag  = regexp.MustCompile(`^--([a-z][a-z-]*)`)
	sourceTypes = []string{".go", ".lua", ".sql", ".md", ".yml", ".yaml", ".sh", ".svg", ".cfg"}
)

func (c *checker) inline(p *page, code span) {
	switch text := code.text; {
	case isTest.MatchString(text):
		if !c.tests[text] {
			c.report(p, code.line, "no test is called %s", text)
		}
	case isMetric.MatchString(text):
		if !c.metrics[text] && !c.names[text] {
			c.report(p, code.line, "no metric is called %s", text)
		}
	case isSomeFlag.MatchString(text):
		if flag := isSomeFlag.FindStringSubmatch(text)[1]; !c.flags[flag] {
			c.report(p, code.line, "no command has the flag --%s", flag)
		}
	case isGoName.MatchString(text):
		found := isGoName.FindStringSubmatch(text)
		if names := c.declared[found[1]]; names != nil && !names[found[2]] && path.Ext(text) != ".md" {
			c.report(p, code.line, "package %s declares no %s", found[1], found[2])
		}
	case isPath.MatchString(text):
		c.path(p, code)
	default:
		c.commandLine(p, code)
	}
}

// path checks what can only be a path: what ends like a source file, or begins like a folder of ours.
func (c *checker) path(p *page, code span) {
	name := strings.TrimSuffix(code.text, "/")
	first, _, nested := strings.Cut(name, "/")
	isSource := slices.Contains(sourceTypes, path.Ext(name))
	switch {
	case !nested && !isSource, nested && !isSource && !c.files[first]:
		return
	case !nested && c.bases[name]:
		return
	}
	for file := range c.files {
		for _, base := range []string{".", path.Dir(p.name)} {
			if ok, err := path.Match(path.Join(base, name), file); ok && err == nil {
				return
			}
		}
	}
	c.report(p, code.line, "%s does not exist", code.text)
}

// reference checks that what the code has stands on the page that lists it.
func (c *checker) reference() {
	for _, list := range []struct {
		page, what string
		names      map[string]bool
	}{
		{referencePage, "the setting", c.settings},
		{referencePage, "the metric", c.metrics},
		{problemsPage, "the problem", c.slugs},
	} {
		p := c.pages[list.page]
		if p == nil {
			c.found = append(c.found, list.page+" does not exist")
			continue
		}
		named := map[string]bool{}
		for _, code := range p.spans() {
			for _, word := range strings.FieldsFunc(code.text, isNoWord) {
				named[word] = true
			}
		}
		for _, name := range slices.Sorted(maps.Keys(list.names)) {
			if !named[name] {
				c.report(p, 1, "%s %s is missing", list.what, name)
			}
		}
	}
	if p := c.pages[problemsPage]; p != nil {
		for _, slug := range p.problems() {
			if !c.slugs[slug.text] {
				c.report(p, slug.line, "no problem is called %s", slug.text)
			}
		}
	}
}

func isNoWord(r rune) bool {
	return r != '_' && r != '-' && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9')
}

var problemRow = regexp.MustCompile("^\\| *(?:`?[45]\\d\\d`?[, ]*)+ *\\| *([^|]*)\\|")

// problems are the slugs in the second column of tables whose first one is a status.
func (p *page) problems() []span {
	var slugs []span
	for i, line := range p.lines {
		if row := problemRow.FindStringSubmatch(line); row != nil {
			for _, found := range codeSpan.FindAllStringSubmatch(row[1], -1) {
				if strings.Trim(found[2], "abcdefghijklmnopqrstuvwxyz-") == "" {
					slugs = append(slugs, span{i + 1, found[2]})
				}
			}
		}
	}
	return slugs
}
