package docs

import (
	"regexp"
	"strings"
	"unicode"
)

// page is a Markdown file, taken apart.
type page struct {
	name  string // from the root, with slashes
	lines []string
	// prose is the text with its fences, comments and table separators blanked out, line for line.
	prose   string
	fences  []fence
	anchors map[string]bool
	// generated holds the lines that a benchmark writes, counted from 1.
	generated map[int]bool
}

// fence is a block of code: its language, the number of its first line of code, and its lines.
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

// heading notes the anchor that GitHub makes of a heading.
func (p *page) heading(line string) {
	found := isHeading.FindStringSubmatch(line)
	if found == nil {
		return
	}
	text := markup.ReplaceAllString(found[1], "$1")
	anchor := strings.Map(func(r rune) rune {
		switch {
		case r == ' ':
			return '-'
		case unicode.IsLetter(r) || unicode.IsNumber(r) || r == '-' || r == '_':
			return unicode.ToLower(r)
		}
		return -1
	}, text)
	p.anchors[anchor] = true
}

var codeSpan = regexp.MustCompile("(?s)(`+)(.*?[^`])(`+)")

// spans are the pieces of inline code of the page. A piece that is wrapped is one line.
func (p *page) spans() []span {
	var spans []span
	line := 1
	for _, paragraph := range strings.SplitAfter(p.prose, "\n\n") {
		for _, at := range codeSpan.FindAllStringSubmatchIndex(paragraph, -1) {
			if at[3]-at[2] != at[7]-at[6] {
				continue
			}
			text := strings.Join(strings.Fields(paragraph[at[4]:at[5]]), " ")
			text = strings.ReplaceAll(text, `\|`, "|")
			spans = append(spans, span{line + strings.Count(paragraph[:at[0]], "\n"), text})
		}
		line += strings.Count(paragraph, "\n")
	}
	return spans
}

// shell are the command lines of the page's fences, each with what continues it.
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
			text, isCommand := strings.CutPrefix(line, prompt)
			if !isCommand && !continues {
				continue
			}
			text, _, _ = strings.Cut(text, " # ")
			text, goesOn := strings.CutSuffix(strings.TrimRight(text, " "), `\`)
			if continues {
				commands[len(commands)-1].text += " " + strings.TrimSpace(text)
			} else {
				commands = append(commands, span{f.first + i, text})
			}
			continues = goesOn
		}
	}
	return commands
}

var (
	link  = regexp.MustCompile(`\]\(([^)\s]+)\)|(?:src|srcset|href)="([^"]+)"`)
	label = regexp.MustCompile(`(?m)^\[[^\]]+\]: (\S+)`)
)

// links are the targets that the page points to.
func (p *page) links() []span {
	text := codeSpan.ReplaceAllStringFunc(p.prose, func(code string) string {
		return strings.Repeat("\n", strings.Count(code, "\n"))
	})
	var links []span
	for _, pattern := range []*regexp.Regexp{link, label} {
		for _, at := range pattern.FindAllStringSubmatchIndex(text, -1) {
			target := ""
			for group := 2; group < len(at); group += 2 {
				if at[group] >= 0 {
					target = text[at[group]:at[group+1]]
				}
			}
			links = append(links, span{1 + strings.Count(text[:at[0]], "\n"), target})
		}
	}
	return links
}
