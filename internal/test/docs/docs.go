// Package docs checks the Markdown of this repository against its code: links, line length, commands, flags,
// environment variables, tasks, metrics, paths and Go names, and writes the reference page. It is for tests.
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
	"unicode"
	"unicode/utf8"

	"github.com/alecthomas/kong"
)

const (
	// proseColumnsMax bounds what is wrapped, lineColumnsMax everything, output and tables of a benchmark too.
	proseColumnsMax, lineColumnsMax = 100, 160
	// frontLinesMax bounds the page that a visitor sees first.
	frontPage, frontLinesMax = "README.md", 125
)

// Check reads all Markdown below root and returns one line per contradiction to the code, with the page and
// its line. Commands is the command line of the program.
func Check(root string, commands *kong.Application) ([]string, error) {
	files := os.DirFS(root)
	src, err := readSource(files)
	if err != nil {
		return nil, err
	}
	c := &checker{source: src, commands: commands, pages: map[string]*page{}, flags: map[string]bool{}}
	c.readCommands(commands.Node)
	for name := range src.files {
		if path.Ext(name) != ".md" {
			continue
		}
		content, err := fs.ReadFile(files, name)
		if err != nil {
			return nil, err
		}
		c.pages[name] = parsePage(name, string(content))
	}
	for _, name := range slices.Sorted(maps.Keys(c.pages)) {
		c.page(c.pages[name])
	}
	return c.found, nil
}

type checker struct {
	*source
	commands *kong.Application
	pages    map[string]*page
	flags    map[string]bool // of all commands
	found    []string
}

func (c *checker) report(p *page, line int, format string, args ...any) {
	c.found = append(c.found, fmt.Sprintf("%s:%d: ", p.name, line)+fmt.Sprintf(format, args...))
}

func (c *checker) page(p *page) {
	c.width(p)
	c.links(p)
	c.namedFunctions(p)
	if p.name == "docs/"+MetricsPage {
		c.checkMetrics(p)
	}
	for _, s := range p.spans() {
		c.inline(p, s)
	}
	for _, command := range p.shell() {
		c.commandLine(p, command)
	}
	for i, line := range p.lines {
		for _, name := range variable.FindAllString(line, -1) {
			if !c.variables[name] {
				c.report(p, i+1, "no code reads the environment variable %s", name)
			}
		}
	}
}

var url = regexp.MustCompile(`https?://[^\s)]+`)

// width checks the length of lines without URLs. Output and tables that a benchmark writes may be longer than prose.
func (c *checker) width(p *page) {
	if lines := len(p.lines) - 1; p.name == frontPage && lines > frontLinesMax {
		c.report(p, 1, "%d lines, want at most %d", lines, frontLinesMax)
	}
	output := map[int]bool{}
	for _, f := range p.fences {
		for i := range f.lines {
			output[f.first+i] = f.language == "console" || f.language == "json"
		}
	}
	for i, line := range p.lines {
		most := proseColumnsMax
		if output[i+1] || p.generated[i+1] && strings.HasPrefix(line, "|") {
			most = lineColumnsMax
		}
		if n := utf8.RuneCountInString(url.ReplaceAllString(line, "")); n > most {
			c.report(p, i+1, "%d columns, want at most %d", n, most)
		}
	}
}

func (c *checker) links(p *page) {
	for _, l := range p.links() {
		if strings.Contains(l.text, "://") || strings.HasPrefix(l.text, "mailto:") {
			continue
		}
		target, anchor, _ := strings.Cut(l.text, "#")
		to := p.name
		if target != "" {
			to = path.Join(path.Dir(p.name), target)
		}
		if !c.files[to] {
			c.report(p, l.line, "%s does not exist", l.text)
			continue
		}
		if linked := c.pages[to]; linked != nil && anchor != "" && !linked.anchors[anchor] {
			c.report(p, l.line, "%s: no heading has this anchor", l.text)
		}
	}
}

// inFile is a function as tables name it behind its file.
var inFile = regexp.MustCompile("`([\\w/]+\\.go)`: `(\\w+)`")

// namedFunctions checks that a file has the functions that stand behind it.
func (c *checker) namedFunctions(p *page) {
	for i, line := range strings.Split(p.prose, "\n") {
		for _, found := range inFile.FindAllStringSubmatch(line, -1) {
			if functions := c.functions[found[1]]; functions != nil && !functions[found[2]] {
				c.report(p, i+1, "%s has no function %s", found[1], found[2])
			}
		}
	}
}

var (
	isPath      = regexp.MustCompile(`^[\w.*-]+(/[\w.*-]+)*/?$`)
	isTestName  = regexp.MustCompile(`^(Test|Benchmark|Fuzz|Example)[A-Z]\w*$`)
	isGoName    = regexp.MustCompile(`^([a-z]+)\.([A-Z]\w*(?:\.[A-Z]\w*)?)(?:\(.*\))?$`)
	isSomeFlag  = regexp.MustCompile(`^--([a-z][a-z-]*)`)
	sourceTypes = []string{".go", ".lua", ".sql", ".md", ".yml", ".yaml", ".sh", ".svg", ".cfg"}
)

func (c *checker) inline(p *page, s span) {
	switch text := s.text; {
	case isTestName.MatchString(text):
		if !c.tests[text] {
			c.report(p, s.line, "there is no test %s", text)
		}
	case isMetric.MatchString(text):
		if !c.metrics[text] && !c.names[text] {
			c.report(p, s.line, "there is no metric %s", text)
		}
	case isSomeFlag.MatchString(text):
		if flag := isSomeFlag.FindStringSubmatch(text)[1]; !c.flags[flag] {
			c.report(p, s.line, "no command has the flag --%s", flag)
		}
	case isGoName.MatchString(text):
		found := isGoName.FindStringSubmatch(text)
		if names := c.declared[found[1]]; names != nil && !names[found[2]] && path.Ext(text) != ".md" {
			c.report(p, s.line, "package %s declares no %s", found[1], found[2])
		}
	case isPath.MatchString(text):
		c.path(p, s)
	default:
		c.commandLine(p, s)
	}
}

// path checks text with the extension of a source file, or below a folder of the repository.
func (c *checker) path(p *page, s span) {
	name := strings.TrimSuffix(s.text, "/")
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
	c.report(p, s.line, "%s does not exist", s.text)
}

// checkMetrics checks that the page names each metric of the code.
func (c *checker) checkMetrics(p *page) {
	for _, name := range slices.Sorted(maps.Keys(c.metrics)) {
		if !strings.Contains(p.prose, "`"+name+"`") {
			c.report(p, 1, "the metric %s is missing", name)
		}
	}
}

// page is a parsed Markdown file.
type page struct {
	name  string // slash-separated path from the root
	lines []string
	// prose is the text in which the lines of fences are empty.
	prose   string
	fences  []fence
	anchors map[string]bool
	// generated holds the numbers of lines that a benchmark writes, from 1.
	generated map[int]bool
}

// fence is a block of code: its language, the number of its first line, and its lines.
type fence struct {
	language string
	first    int
	lines    []string
}

// span is a piece of inline code.
type span struct {
	line int
	text string
}

const (
	generatedBegin = "<!-- figures: written by the benchmark -->"
	generatedEnd   = "<!-- end of figures -->"
)

func parsePage(name, text string) *page {
	p := &page{name: name, lines: strings.Split(text, "\n"), anchors: map[string]bool{}, generated: map[int]bool{}}
	prose := make([]string, len(p.lines))
	var open *fence
	var generated bool
	for i, line := range p.lines {
		mark, isFence := strings.CutPrefix(strings.TrimSpace(line), "```")
		switch {
		case isFence && open == nil:
			open = &fence{language: mark, first: i + 2}
		case isFence:
			p.fences = append(p.fences, *open)
			open = nil
		case open != nil:
			open.lines = append(open.lines, line)
		default:
			prose[i] = line
			p.heading(line)
		}
		switch line {
		case generatedBegin:
			generated = true
		case generatedEnd:
			generated = false
		}
		p.generated[i+1] = generated
	}
	p.prose = strings.Join(prose, "\n")
	return p
}

var (
	isHeading = regexp.MustCompile(`^#{1,6} +(.*?) *$`)
	markup    = regexp.MustCompile("`|\\*|!?\\[([^\\]]*)\\]\\([^)]*\\)")
)

// heading adds the anchor that GitHub gives a heading.
func (p *page) heading(line string) {
	found := isHeading.FindStringSubmatch(line)
	if found == nil {
		return
	}
	title := markup.ReplaceAllString(found[1], "$1")
	anchor := strings.Map(func(r rune) rune {
		switch {
		case r == ' ':
			return '-'
		case unicode.IsLetter(r) || unicode.IsNumber(r) || r == '-' || r == '_':
			return unicode.ToLower(r)
		}
		return -1
	}, title)
	p.anchors[anchor] = true
}

var codeSpan = regexp.MustCompile("(?s)(`+)(.*?[^`])(`+)")

// spans returns the pieces of inline code of the page. Wrapped pieces are joined to one line.
func (p *page) spans() []span {
	var spans []span
	line := 1
	for _, paragraph := range strings.SplitAfter(p.prose, "\n\n") {
		for _, at := range codeSpan.FindAllStringSubmatchIndex(paragraph, -1) {
			if at[3]-at[2] != at[7]-at[6] {
				continue
			}
			code := strings.Join(strings.Fields(paragraph[at[4]:at[5]]), " ")
			code = strings.ReplaceAll(code, `\|`, "|")
			spans = append(spans, span{line + strings.Count(paragraph[:at[0]], "\n"), code})
		}
		line += strings.Count(paragraph, "\n")
	}
	return spans
}

// shell returns the command lines in the page's fences, with continued lines joined.
func (p *page) shell() []span {
	var commands []span
	for _, f := range p.fences {
		prompt := ""
		switch f.language {
		case "sh", "bash":
		case "console":
			prompt = "$ "
		default:
			continue
		}
		continues := false
		for i, line := range f.lines {
			command, isCommand := strings.CutPrefix(line, prompt)
			if !isCommand && !continues {
				continue
			}
			command, _, _ = strings.Cut(command, " # ")
			command, isContinued := strings.CutSuffix(strings.TrimRight(command, " "), `\`)
			if continues {
				commands[len(commands)-1].text += " " + strings.TrimSpace(command)
			} else {
				commands = append(commands, span{f.first + i, command})
			}
			continues = isContinued
		}
	}
	return commands
}

var (
	linkTarget = regexp.MustCompile(`\]\(([^)\s]+)\)|(?:src|srcset|href)="([^"]+)"`)
	linkLabel  = regexp.MustCompile(`(?m)^\[[^\]]+\]: (\S+)`)
)

// links returns the targets of the page's links.
func (p *page) links() []span {
	prose := codeSpan.ReplaceAllStringFunc(p.prose, func(code string) string {
		return strings.Repeat("\n", strings.Count(code, "\n"))
	})
	var links []span
	for _, pattern := range []*regexp.Regexp{linkTarget, linkLabel} {
		for _, at := range pattern.FindAllStringSubmatchIndex(prose, -1) {
			target := ""
			for group := 2; group < len(at); group += 2 {
				if at[group] >= 0 {
					target = prose[at[group]:at[group+1]]
				}
			}
			links = append(links, span{1 + strings.Count(prose[:at[0]], "\n"), target})
		}
	}
	return links
}
