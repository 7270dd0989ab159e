package docs

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/alecthomas/kong"
)

// Written is a line of each page that is written from the code.
const Written = "Written from the code by `task docs`."

// Pages that are written from the code, in the folder docs.
const (
	ReferencePage = "reference.md"
	MetricsPage   = "metrics.md"
)

// referenceBegin is the text of the reference page in front of its lists.
const referenceBegin = `# Reference

` + Written + ` [Metrics](metrics.md) have a page of their own.

## Commands and settings

A setting is an environment variable, and a flag: the variable in lower case with hyphens, without
` + "`STAMPEDE_`" + ` and the name of its command. A command with ` + "`--help`" + ` lists all that it takes.
` + "`stampede dev`" + ` also takes most settings of ` + "`serve`, `work` and `relay run`" + `.

`

// setting is a variable and its help text, which differs between commands.
type setting struct{ variable, help string }

func (s setting) text() string { return "`" + s.variable + "`: " + s.help }

// takersMax is how many commands are listed at most that take the same setting.
const takersMax = 3

// Reference returns the page with the commands and settings of the program, the problems of the API, and the fields of
// the log.
func Reference(root string, program *kong.Application, problems []string) (string, error) {
	src, err := readSource(os.DirFS(root))
	if err != nil {
		return "", err
	}
	var b strings.Builder
	b.WriteString(referenceBegin)
	writeCommands(&b, program)
	b.WriteString("\n## Problems\n\nEach is a page of every ingress: `/problems/SLUG`.\n\n")
	for _, problem := range problems {
		b.WriteString(Item("", problem+"."))
	}
	b.WriteString("\n## Fields of the log\n\n")
	writeFields(&b, slices.Sorted(maps.Keys(src.fields)))
	return b.String(), nil
}

// writeFields lists sorted fields, those with the same first letter as one item.
func writeFields(b *strings.Builder, fields []string) {
	for len(fields) > 0 {
		next := slices.IndexFunc(fields, func(field string) bool { return field[0] != fields[0][0] })
		if next < 0 {
			next = len(fields)
		}
		b.WriteString(Item("", "`"+strings.Join(fields[:next], "`, `")+"`"))
		fields = fields[next:]
	}
}

var (
	// itemWord is what a line of an item is not broken in: a word, or a piece of code with the spaces in it.
	itemWord = regexp.MustCompile("(?:`[^`]*`|[^\\s`])+")
	// marker is a word that begins something else than text at the begin of a line, such as a list.
	marker = regexp.MustCompile(`^([-+*>]|#+|=+|\d+[.)])$`)
)

// Item returns text as an item of a Markdown list below indent. It is wrapped by itself, so that a change of one text
// changes the lines of its item only.
func Item(indent, text string) string {
	return fill(indent+"- ", indent+"  ", text)
}

// fill returns the lines of text at the width of prose, the first one after first, and the others after rest.
func fill(first, rest, text string) string {
	var words []string
	for _, word := range itemWord.FindAllString(text, -1) {
		if marker.MatchString(word) && len(words) > 0 {
			words[len(words)-1] += " " + word
			continue
		}
		words = append(words, word)
	}
	var b strings.Builder
	line := first
	for i, word := range words {
		switch {
		case i == 0:
			line += word
		case utf8.RuneCountInString(line+" "+word) <= proseColumnsMax:
			line += " " + word
		default:
			b.WriteString(line + "\n")
			line = rest + word
		}
	}
	b.WriteString(line + "\n")
	return b.String()
}

// writeCommands lists each command with the settings that only it takes, and then those of several commands.
func writeCommands(b *strings.Builder, program *kong.Application) {
	leaves := slices.DeleteFunc(program.Leaves(true), func(n *kong.Node) bool { return n.Name == "" })
	takers := map[setting][]string{}
	var all []setting
	for _, node := range append([]*kong.Node{program.Node}, leaves...) {
		for _, s := range settings(node) {
			if takers[s] == nil {
				all = append(all, s)
			}
			takers[s] = append(takers[s], node.Path())
		}
	}
	for s, commands := range takers {
		if len(commands) > 1 { // dev takes most settings of other commands
			takers[s] = slices.DeleteFunc(commands, func(command string) bool { return command == "dev" })
		}
	}
	for _, leaf := range leaves {
		usage := leaf.FullPath()
		for _, argument := range leaf.Positional {
			usage += " " + argument.Summary()
		}
		b.WriteString(Item("", "`"+usage+"`: "+leaf.Help))
		for _, s := range all {
			if slices.Equal(takers[s], []string{leaf.Path()}) {
				b.WriteString(Item("  ", s.text()))
			}
		}
	}
	b.WriteString("\nOf several commands:\n\n")
	for _, s := range all {
		switch commands := takers[s]; {
		case slices.Equal(commands, []string{program.Path()}) || len(commands) > takersMax:
			b.WriteString(Item("", s.text()))
		case len(commands) > 1:
			b.WriteString(Item("", s.text()+" (`"+strings.Join(commands, "`, `")+"`)"))
		}
	}
}

// settings returns the flags of a command that environment variables set.
func settings(node *kong.Node) (all []setting) {
	for _, flag := range node.Flags {
		if flag.Hidden || len(flag.Envs) == 0 {
			continue
		}
		help := flag.Help
		if flag.Required && len(flag.Xor) == 0 {
			help = "Required. " + help
		}
		all = append(all, setting{flag.Envs[0], help})
	}
	return all
}

// readCommands collects the flags and variables of a command and its subcommands.
func (c *checker) readCommands(node *kong.Node) {
	for _, flag := range node.Flags {
		c.flags[flag.Name] = true
		for _, name := range flag.Envs {
			c.variables[name] = true
		}
	}
	for _, child := range node.Children {
		c.readCommands(child)
	}
}

var (
	program = regexp.MustCompile(`^(?:\$ )?(?:[A-Z_]+=\S* )*(?:go run \./cmd/|(?:\./)?bin/|docker compose \w+ ` +
		`.*)?stampede((?: .*)?)$`)
	task   = regexp.MustCompile(`(?:^|\s)task(?: ([a-z][a-z:-]*))`)
	option = regexp.MustCompile(`--([a-z][a-z-]*)`)
)

// commandLine checks the words after the name of the program, and after task.
func (c *checker) commandLine(p *page, line span) {
	for _, command := range strings.FieldsFunc(line.text, func(r rune) bool { return r == ';' || r == '&' }) {
		if found := program.FindStringSubmatch(strings.TrimSpace(command)); found != nil {
			c.command(p, line.line, found[1])
		}
		for _, found := range task.FindAllStringSubmatch(command, -1) {
			if !c.tasks[found[1]] {
				c.report(p, line.line, "there is no task %s", found[1])
			}
		}
	}
}

// command follows words into the tree of commands. All alternatives, as in up|down, are checked.
func (c *checker) command(p *page, line int, text string) {
	node := c.commands.Node
	nodes := []*kong.Node{node}
	words := strings.Fields(text)
	for len(words) > 0 && len(node.Children) > 0 {
		word := strings.Trim(words[0], "[]")
		if strings.HasPrefix(word, "-") || word == "…" || word == "" {
			break
		}
		for _, name := range strings.Split(word, "|") {
			i := slices.IndexFunc(node.Children, func(child *kong.Node) bool { return child.Name == name })
			if i < 0 {
				c.report(p, line, "%s has no command %s", node.FullPath(), name)
				return
			}
			nodes = append(nodes, node.Children[i])
		}
		node = nodes[len(nodes)-1]
		words = words[1:]
	}
	for _, found := range option.FindAllStringSubmatch(strings.Join(words, " "), -1) {
		if found[1] != "help" && !slices.ContainsFunc(nodes, func(n *kong.Node) bool { return hasFlag(n, found[1]) }) {
			c.report(p, line, "%s has no flag --%s", node.FullPath(), found[1])
		}
	}
}

func hasFlag(node *kong.Node, name string) bool {
	return slices.ContainsFunc(node.Flags, func(f *kong.Flag) bool { return f.Name == name })
}
