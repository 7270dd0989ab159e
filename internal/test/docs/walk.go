package docs

import (
	"fmt"
	"regexp"
	"strings"
)

// walk is the language of fences with the walk of one order: each line is a visit to a file, with the
// functions that run there.
const walk = "walk"

var (
	visit     = regexp.MustCompile(`^ *\d+ +(\S+): +(\S.*)$`)
	continued = regexp.MustCompile(`^ {8,}\S`)
)

// walks checks that the functions of a walk exist, and that the sentence after it has the right counts of
// files, visits and returns. A return is a visit to a file that was visited before.
func (c *checker) walks(p *page) {
	for _, f := range p.fences {
		if f.language != walk {
			continue
		}
		seen := map[string]bool{}
		var file string
		var visits, returns int
		for i, line := range f.lines {
			functions := line
			if !continued.MatchString(line) {
				found := visit.FindStringSubmatch(line)
				if found == nil {
					c.report(p, f.first+i, "want a number, a file and its functions")
					continue
				}
				file, functions = found[1], found[2]
				visits++
				if seen[file] {
					returns++
				}
				seen[file] = true
			}
			for _, function := range strings.FieldsFunc(functions, func(r rune) bool { return r == ',' || r == ' ' }) {
				switch {
				case !c.files[file]:
					c.report(p, f.first+i, "%s does not exist", file)
				case c.functions[file] != nil && !c.functions[file][function]:
					c.report(p, f.first+i, "%s has no function %s", file, function)
				}
			}
		}
		want := fmt.Sprintf("%d files, %d visits, %d returns", len(seen), visits, returns)
		if after := strings.Join(p.lines[f.first+len(f.lines):], "\n"); !strings.HasPrefix(strings.TrimSpace(after), want) {
			c.report(p, f.first-1, "want the counts after this walk: %s", want)
		}
	}
}
