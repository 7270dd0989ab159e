package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"regexp"
	"strconv"
	"strings"
)

// source holds the names in the code to which pages may refer.
type source struct {
	// variables are the environment variables in literals, of flags or tests.
	variables map[string]bool
	metrics   map[string]bool
	// names are other literals with the prefix of a metric.
	names map[string]bool
	tasks map[string]bool
	// files are all paths, and bases the base names of all files.
	files map[string]bool
	bases map[string]bool
	// declared holds declared names by package.
	declared map[string]map[string]bool
	// functions holds the functions and methods by file.
	functions map[string]map[string]bool
	tests     map[string]bool
	// fields are those of the log.
	fields map[string]bool
}

func readSource(root fs.FS) (*source, error) {
	c := &source{
		variables: map[string]bool{}, metrics: map[string]bool{}, names: map[string]bool{},
		tasks: map[string]bool{}, files: map[string]bool{}, bases: map[string]bool{},
		declared: map[string]map[string]bool{}, functions: map[string]map[string]bool{}, tests: map[string]bool{},
		fields: map[string]bool{},
	}
	err := fs.WalkDir(root, ".", func(name string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && isHidden(name):
			return fs.SkipDir
		}
		c.files[name] = true
		if entry.IsDir() {
			return nil
		}
		c.bases[path.Base(name)] = true
		switch {
		case path.Ext(name) == ".go":
			return c.readGo(root, name)
		case name == "Taskfile.yml":
			return c.readTasks(root, name)
		case name == "compose.yaml" || name == "compose.cluster.yaml" || path.Ext(name) == ".sh":
			return c.readVariables(root, name)
		}
		return nil
	})
	return c, err
}

// isHidden reports whether a folder has no files of the repository.
func isHidden(folder string) bool {
	base := path.Base(folder)
	return base == ".git" || base == "node_modules" || base == ".venv" || base == "bin"
}

var (
	isVariable = regexp.MustCompile(`^(STAMPEDE_[A-Z_]+|REDIS_URL|DATABASE_URL)$`)
	variable   = regexp.MustCompile(`\b(STAMPEDE_[A-Z][A-Z_]*[A-Z]|REDIS_URL|DATABASE_URL)\b`)
	isMetric   = regexp.MustCompile(`^stampede_[a-z_]*[a-z]$`)
	isTask     = regexp.MustCompile(`(?m)^  ([a-z][a-z:-]*):$`)
)

func (c *source) readVariables(root fs.FS, name string) error {
	content, err := fs.ReadFile(root, name)
	for _, found := range variable.FindAllString(string(content), -1) {
		c.variables[found] = true
	}
	return err
}

func (c *source) readTasks(root fs.FS, name string) error {
	content, err := fs.ReadFile(root, name)
	_, tasks, _ := strings.Cut(string(content), "\ntasks:\n")
	for _, found := range isTask.FindAllStringSubmatch(tasks, -1) {
		c.tasks[found[1]] = true
	}
	return err
}

func (c *source) readGo(root fs.FS, name string) error {
	content, err := fs.ReadFile(root, name)
	if err != nil {
		return err
	}
	file, err := parser.ParseFile(token.NewFileSet(), name, content, parser.SkipObjectResolution)
	if err != nil {
		return nil //nolint:nilerr // test data; the compiler checks the rest
	}
	inTest := strings.HasSuffix(name, "_test.go")
	c.functions[name] = map[string]bool{}
	for _, decl := range file.Decls {
		if function, ok := decl.(*ast.FuncDecl); ok {
			c.functions[name][function.Name.Name] = true
		}
	}
	c.declarations(file, inTest)
	if !inTest && logsFor(name) {
		c.logFields(file)
	}
	constants := map[*ast.BasicLit]bool{}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GenDecl:
			if n.Tok == token.CONST {
				ast.Inspect(n, func(n ast.Node) bool {
					if literal, ok := n.(*ast.BasicLit); ok {
						constants[literal] = true
					}
					return true
				})
			}
		case *ast.BasicLit:
			switch value := stringValue(n); {
			case isVariable.MatchString(value):
				c.variables[value] = true
			case !isMetric.MatchString(value):
			case constants[n] || inTest:
				c.names[value] = true
			default:
				c.metrics[value] = true
			}
		}
		return true
	})
	return nil
}

// logsFor reports whether a file is part of a service: benchmarks, examples and tools log for their users only.
func logsFor(name string) bool {
	first, _, _ := strings.Cut(name, "/")
	return first != "bench" && first != "examples" && first != "tools" && !strings.HasPrefix(name, "internal/test")
}

// stringValue returns the value of a string literal, "" for anything else.
func stringValue(n ast.Node) string {
	literal, ok := n.(*ast.BasicLit)
	if !ok || literal.Kind != token.STRING {
		return ""
	}
	value, _ := strconv.Unquote(literal.Value) // valid after parsing
	return value
}

func (c *source) declarations(file *ast.File, inTest bool) {
	pkg := strings.TrimSuffix(file.Name.Name, "_test")
	if c.declared[pkg] == nil {
		c.declared[pkg] = map[string]bool{}
	}
	for _, decl := range file.Decls {
		switch decl := decl.(type) {
		case *ast.FuncDecl:
			function := decl.Name.Name
			if inTest {
				c.tests[function] = true
			}
			if receiver := receiverName(decl); receiver != "" {
				function = receiver + "." + function
			}
			c.declared[pkg][function] = true
		case *ast.GenDecl:
			for _, spec := range decl.Specs {
				switch spec := spec.(type) {
				case *ast.TypeSpec:
					c.declared[pkg][spec.Name.Name] = true
				case *ast.ValueSpec:
					for _, name := range spec.Names {
						c.declared[pkg][name.Name] = true
					}
				}
			}
		}
	}
}

func receiverName(decl *ast.FuncDecl) string {
	if decl.Recv == nil {
		return ""
	}
	t := decl.Recv.List[0].Type
	if pointer, ok := t.(*ast.StarExpr); ok {
		t = pointer.X
	}
	if generic, ok := t.(*ast.IndexExpr); ok {
		t = generic.X
	}
	name, _ := t.(*ast.Ident)
	if name == nil {
		return ""
	}
	return name.Name
}

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
