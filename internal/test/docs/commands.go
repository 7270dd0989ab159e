package docs

import (
	"regexp"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
)

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
