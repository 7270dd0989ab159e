package main

import (
	"fmt"
	"strings"

	"github.com/alecthomas/kong"
)

// completeCmd prints what can stand in the place of the last word, one a line, with a tab and a description behind it;
// or :files or :dirs.
type completeCmd struct {
	Words []string `arg:"" optional:"" passthrough:"" help:"Words behind the name of the program; the last one is completed."`
}

func (c *completeCmd) Run(s *streams) error {
	words := c.Words
	if len(words) > 0 && words[0] == "--" {
		words = words[1:]
	}
	for _, candidate := range complete(newParser(&cli{}).Model.Node, words) {
		if _, err := fmt.Fprintln(s.out, candidate); err != nil {
			return err
		}
	}
	return nil
}

// complete follows the words into the tree of commands.
func complete(node *kong.Node, words []string) []string {
	if len(words) == 0 {
		words = []string{""}
	}
	words = joinedValues(words)
	before, word := words[:len(words)-1], words[len(words)-1]
	var waiting *kong.Flag // a flag whose value comes next
	arguments := 0
	for _, w := range before {
		switch child := subcommand(node, w); {
		case waiting != nil:
			waiting = nil
		case w == "--":
			return positional(node, arguments, word)
		case strings.HasPrefix(w, "-"):
			if waiting = flagNamed(node, w); waiting != nil && waiting.IsBool() {
				waiting = nil
			}
		case child != nil:
			node = child
		default:
			arguments++
		}
	}
	name, value, assigned := strings.Cut(word, "=")
	switch {
	case waiting != nil:
		return completeValue(waiting.Value, word, "")
	case strings.HasPrefix(word, "-") && assigned:
		flag := flagNamed(node, name)
		if flag == nil || flag.IsBool() {
			return nil
		}
		return completeValue(flag.Value, value, name+"=")
	case strings.HasPrefix(word, "-"):
		return completeFlags(node, word)
	}
	var found []string
	for _, child := range node.Children {
		if !child.Hidden && strings.HasPrefix(child.Name, word) {
			found = append(found, candidate(child.Name, child.Help))
		}
	}
	if len(node.Children) == 0 {
		return positional(node, arguments, word)
	}
	return found
}

// joinedValues undoes that bash makes three words of --flag=value, and --flag= of a flag in front of "=". The value is
// then a word of its own, which is what bash wants to have completed.
func joinedValues(words []string) (joined []string) {
	for i, w := range words {
		switch {
		case w != "=" || i == 0 || !strings.HasPrefix(words[i-1], "--"):
			joined = append(joined, w)
		case i == len(words)-1:
			joined = append(joined, "")
		}
	}
	return joined
}

func subcommand(node *kong.Node, name string) *kong.Node {
	for _, child := range node.Children {
		if child.Name == name {
			return child
		}
	}
	return nil
}

// flagNamed returns a flag of the command or one above it, as --name, -n or --name=value; nil if it has its value.
func flagNamed(node *kong.Node, word string) *kong.Flag {
	for _, group := range node.AllFlags(false) {
		for _, flag := range group {
			if word == "--"+flag.Name || flag.Short != 0 && word == "-"+string(flag.Short) {
				return flag
			}
		}
	}
	return nil
}

func completeFlags(node *kong.Node, prefix string) (found []string) {
	for _, group := range node.AllFlags(true) {
		for _, flag := range group {
			if name := "--" + flag.Name; strings.HasPrefix(name, prefix) {
				found = append(found, candidate(name, flag.Help))
			}
		}
	}
	return found
}

// positional completes the nth argument of a command.
func positional(node *kong.Node, n int, word string) []string {
	if n >= len(node.Positional) {
		return nil
	}
	return completeValue(node.Positional[n], word, "")
}

// completeValue completes a value that begins with word; before stands in front of it.
func completeValue(value *kong.Value, word, before string) (found []string) {
	placeholder := value.Tag.PlaceHolder
	switch {
	case value.Enum != "":
		for _, name := range strings.Split(value.Enum, ",") {
			if name != "" && strings.HasPrefix(name, word) {
				found = append(found, candidate(before+name, ""))
			}
		}
	case value.Tag.Type == "existingdir" || placeholder == "DIR":
		return []string{":dirs"}
	case value.Tag.Type == "existingfile" || placeholder == "FILE":
		return []string{":files"}
	}
	return found
}

// candidate has the first sentence of the help as its description.
func candidate(name, help string) string {
	first, _, _ := strings.Cut(help, ". ")
	return name + "\t" + strings.TrimSuffix(strings.Join(strings.Fields(first), " "), ".")
}
