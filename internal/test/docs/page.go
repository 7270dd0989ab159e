package docs

import (
	"regexp"
	"strings"
	"unicode"
)

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
