// Command exports names what a module exports and only the package itself uses: exported means used from outside.
// Its arguments are the folders of the modules that use each other, and -except names packages for other modules.
package main

import (
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/types"
	"maps"
	"os"
	"slices"
	"strings"

	"golang.org/x/tools/go/packages"
)

func main() {
	except := flag.String("except", "",
		"import `paths` of packages that are there for other modules, with commas between them")
	flag.Parse()
	unused, err := unusedExports(flag.Args(), strings.Split(*except, ","))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	for _, line := range unused {
		fmt.Println(line)
	}
	if len(unused) > 0 {
		os.Exit(1)
	}
}

// unusedExports returns a line for each exported name that no other package uses, in the order of the files.
func unusedExports(folders, except []string) ([]string, error) {
	exported := map[string]string{} // where each name is declared
	used := map[string]bool{}
	for _, folder := range folders {
		loaded, err := packages.Load(&packages.Config{
			Mode: packages.NeedName | packages.NeedModule | packages.NeedSyntax | packages.NeedTypes | packages.NeedTypesInfo |
				packages.NeedImports | packages.NeedDeps,
			Dir: folder, Tests: true,
		}, "./...")
		if err != nil {
			return nil, err
		}
		for _, p := range loaded {
			if len(p.Errors) > 0 {
				return nil, errors.Join(fmt.Errorf("load %s", p.ID), p.Errors[0])
			}
			if p.Name != "main" && p.ID == p.PkgPath && !strings.HasSuffix(p.Name, "_test") &&
				!slices.Contains(except, p.PkgPath) {
				addExported(exported, p)
			}
			addUsed(used, p)
		}
	}
	for name := range used {
		delete(exported, name)
	}
	var lines []string
	for _, name := range slices.Sorted(maps.Keys(exported)) {
		lines = append(lines, fmt.Sprintf("%s: %s is exported, and only its own package uses it", exported[name], name))
	}
	slices.Sort(lines)
	return lines, nil
}

func addExported(exported map[string]string, p *packages.Package) {
	for _, object := range p.TypesInfo.Defs {
		if object != nil && object.Exported() && nameOf(object) != "" {
			exported[nameOf(object)] = p.Fset.Position(object.Pos()).String()
		}
	}
}

// addUsed adds what the package uses of others. Its external tests are a part of it.
func addUsed(used map[string]bool, p *packages.Package) {
	own := strings.TrimSuffix(p.PkgPath, "_test")
	for _, object := range p.TypesInfo.Uses {
		if object.Pkg() != nil && object.Pkg().Path() != own {
			used[nameOf(object)] = true
		}
	}
}

// nameOf is the name of an object of a package, the same in all its variants; "" for a local one, a field and a method.
func nameOf(object types.Object) string {
	if object.Pkg() == nil || object.Parent() != object.Pkg().Scope() || !ast.IsExported(object.Name()) {
		return ""
	}
	return object.Pkg().Path() + "." + object.Name()
}
