package locks

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"stampede/bench/designs/redisson"
	"stampede/bench/page"
)

var (
	figures     page.Figures
	figuresFile = flag.String("figures", "", "a Markdown `file` with a place for the figures, to write them there too")
)

func TestMain(m *testing.M) {
	code := m.Run()
	stopAll()
	tables, _, err := figures.Write() // none has a chart
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	} else if tables != "" {
		text := "Machine: " + page.Machine() + ". " + versions() + ".\n\n" + tables
		fmt.Printf("\n%s", text)
		if *figuresFile != "" && code == 0 {
			if err := page.Replace(*figuresFile, text); err != nil {
				fmt.Fprintln(os.Stderr, err)
				code = 1
			}
		}
	}
	os.Exit(code)
}

// versions names what was compared. It reads go.mod, because a test binary does not know its
// modules.
func versions() string {
	names := []string{"Redis " + serverVersion}
	mod, _ := os.ReadFile("../go.mod")
	module := regexp.MustCompile(`(?m)^\s+github\.com/\S*?(redsync|redislock|rueidis|go-redis)(?:/v\d+)? (v\S+)$`)
	for _, found := range module.FindAllStringSubmatch(string(mod), -1) {
		names = append(names, found[1]+" "+found[2])
	}
	if version := redisson.Version(); version != "" {
		names = append(names, "Redisson "+version)
	}
	return strings.Join(names, ", ")
}
