// Command redraw redraws the pictures of the pages in a folder from the figures in the pages.
package main

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"stampede/bench/page"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: redraw FOLDER")
		os.Exit(2)
	}
	if err := redraw(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func redraw(folder string) error {
	plots, err := page.Redraw(folder)
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(plots)) {
		if err := os.WriteFile(filepath.Join(folder, name), plots[name], 0o644); err != nil {
			return err
		}
	}
	return nil
}
