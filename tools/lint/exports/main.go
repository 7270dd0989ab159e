// Command exports lists exported names that no other package uses. External tests of a package count as other
// packages. A type counts as used if it appears in a used signature, field or constant. The arguments are the folders
// of the modules that use each other.
package main

import (
	"fmt"
	"go/types"
	"os"
	"slices"

	"golang.org/x/tools/go/packages"
)

func main() {
	unused, err := unusedExports(os.Args[1:])
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

// names holds the exported and the used names of all packages.
type names struct {
	exported map[string]types.Object
	where    map[string]string
	used     map[string]bool
	toWalk   []types.Object
}

// unusedExports returns a line for each exported name that no other package uses, in the order of the files.
func unusedExports(folders []string) ([]string, error) {
	n := names{exported: map[string]types.Object{}, where: map[string]string{}, used: map[string]bool{}}
	for _, folder := range folders {
		loaded, err := packages.Load(&packages.Config{
			Mode: packages.NeedName | packages.NeedSyntax | packages.NeedTypes | packages.NeedTypesInfo |
				packages.NeedImports | packages.NeedDeps,
			Dir: folder, Tests: true,
			// Tests have these tags, each with names that no other uses.
			BuildFlags: []string{"-tags=redisson,schemathesis,kafka,system,upgrade,desk,browser"},
		}, "./...")
		if err != nil {
			return nil, err
		}
		for _, p := range loaded {
			if len(p.Errors) > 0 {
				return nil, fmt.Errorf("load %s: %w", p.ID, p.Errors[0])
			}
			if p.Name != "main" && p.ID == p.PkgPath {
				n.addExported(p)
			}
			for _, object := range p.TypesInfo.Uses {
				if object.Pkg() != nil && object.Pkg().Path() != p.PkgPath {
					n.use(object)
				}
			}
		}
	}
	for len(n.toWalk) > 0 {
		object := n.toWalk[0]
		n.toWalk = n.toWalk[1:]
		n.walk(object)
	}
	var lines []string
	for name := range n.exported {
		if !n.used[name] {
			lines = append(lines, fmt.Sprintf("%s: %s is exported, but only its own package uses it", n.where[name], name))
		}
	}
	slices.Sort(lines)
	return lines, nil
}

func (n *names) addExported(p *packages.Package) {
	for _, object := range p.TypesInfo.Defs {
		if object == nil {
			continue
		}
		if name := qualifiedName(object); name != "" {
			n.exported[name], n.where[name] = object, p.Fset.Position(object.Pos()).String()
		}
	}
}

// use marks a name as used, and queues the names that belong to it.
func (n *names) use(object types.Object) {
	name := qualifiedName(object)
	if name == "" || n.used[name] {
		return
	}
	n.used[name] = true
	n.toWalk = append(n.toWalk, object)
}

// walk marks the types that an object exposes, and the constants of a type, as used.
func (n *names) walk(object types.Object) {
	named, isNamed := object.Type().(*types.Named)
	if _, isType := object.(*types.TypeName); !isType || !isNamed {
		n.walkType(object.Type())
		return
	}
	n.walkType(named.Underlying())
	for method := range named.Methods() {
		if method.Exported() {
			n.walkType(method.Type())
		}
	}
	for _, other := range n.exported {
		if _, isConst := other.(*types.Const); isConst &&
			types.TypeString(other.Type(), nil) == types.TypeString(named, nil) {
			n.use(other)
		}
	}
}

func (n *names) walkType(t types.Type) {
	switch t := t.(type) {
	case *types.Named:
		n.use(t.Obj())
		for argument := range t.TypeArgs().Types() {
			n.walkType(argument)
		}
	case *types.Alias:
		n.use(t.Obj())
	case *types.Struct:
		for field := range t.Fields() {
			if field.Exported() {
				n.walkType(field.Type())
			}
		}
	case *types.Interface:
		for method := range t.Methods() {
			n.walkType(method.Type())
		}
	case *types.Signature:
		n.walkType(t.Params())
		n.walkType(t.Results())
	case *types.Tuple:
		for variable := range t.Variables() {
			n.walkType(variable.Type())
		}
	case *types.Map:
		n.walkType(t.Key())
		n.walkType(t.Elem())
	case interface{ Elem() types.Type }: // pointers, slices, arrays, channels
		n.walkType(t.Elem())
	}
}

// qualifiedName is the same in all variants of the package; it is "" for an object that is not exported.
func qualifiedName(object types.Object) string {
	if object.Pkg() == nil || !object.Exported() || object.Parent() != object.Pkg().Scope() {
		return ""
	}
	return object.Pkg().Path() + "." + object.Name()
}
