package docs

import (
	"go/ast"
	"regexp"
)

// firstField is the place of the first field in a call of a method of slog.Logger.
var firstField = map[string]int{
	"Debug": 1, "Info": 1, "Warn": 1, "Error": 1,
	"DebugContext": 2, "InfoContext": 2, "WarnContext": 2, "ErrorContext": 2, "Log": 3, "With": 0,
}

// logFields adds the fields that a file logs: those of calls of slog.Logger, of attributes of slog, and of lists of
// fields, which begin with a name and have as many names as values.
func (c *source) logFields(file *ast.File) {
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.AssignStmt:
			return !isArguments(n.Lhs[0]) || len(n.Lhs) > 1
		case *ast.CompositeLit:
			if list, ok := n.Type.(*ast.ArrayType); ok && isAny(list.Elt) && len(n.Elts)%2 == 0 {
				c.addFields(n.Elts)
			}
		case *ast.CallExpr:
			switch called := n.Fun.(type) {
			case *ast.Ident:
				if called.Name == "append" && len(n.Args)%2 == 1 && !n.Ellipsis.IsValid() && !isArguments(n.Args[0]) {
					c.addFields(n.Args[1:])
				}
			case *ast.SelectorExpr:
				first, logs := firstField[called.Sel.Name]
				if logs && len(n.Args) >= first && (first != 1 || !isContext(n.Args[0])) {
					c.addFields(n.Args[first:])
				}
				if from, ok := called.X.(*ast.Ident); ok && from.Name == "slog" && len(n.Args) == 2 {
					c.addFields(n.Args)
				}
			}
		}
		return true
	})
}

// isArguments reports whether a list holds the arguments of a command of Redis, not fields.
func isArguments(e ast.Expr) bool {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name == "args"
	case *ast.SelectorExpr:
		return e.Sel.Name == "args"
	case *ast.SliceExpr:
		return isArguments(e.X)
	}
	return false
}

// isContext reports whether a call begins with a context, as Info of a client of Redis does.
func isContext(e ast.Expr) bool {
	name, ok := e.(*ast.Ident)
	return ok && name.Name == "ctx"
}

func isAny(e ast.Expr) bool {
	name, ok := e.(*ast.Ident)
	return ok && name.Name == "any"
}

var isField = regexp.MustCompile(`^[a-z][a-z_]*$`)

// addFields adds the names among names and values in turns, with attributes of slog between them.
func (c *source) addFields(list []ast.Expr) {
	for i := 0; i < len(list); i++ {
		if name := stringValue(list[i]); isField.MatchString(name) && i+1 < len(list) {
			c.fields[name] = true
			i++ // its value
		} else if _, attribute := list[i].(*ast.CallExpr); !attribute {
			return // no fields
		}
	}
}
