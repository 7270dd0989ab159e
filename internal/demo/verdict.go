package demo

import (
	"cmp"
	"context"
	"fmt"
	"io"

	"stampede/fulfillment/audit"
	"stampede/internal/crowd"
	"stampede/internal/figure"
)

// promiseLine is one promise of the verdict, with its figures or what breaks it.
type promiseLine struct {
	promise string
	says    string
	figures string
	broken  []string
	// unchecked lists why it could not be checked completely.
	unchecked []string
}

// judge audits the sale after the crowd, adds the comparison, and prints the verdict.
func (d *demo) judge(ctx context.Context, report crowd.Report, comparison crowd.Comparison) error {
	audited, err := audit.Run(ctx, audit.Config{
		Pool: d.pool, Redis: d.redis, Keys: d.keys, Wait: arrivalPatience, Sale: d.sale,
	})
	if err != nil {
		return err
	}
	var lines []promiseLine
	for _, p := range audited.Promises {
		l := promiseLine{promise: p.Name, says: p.Says, figures: audited.Figures(p.Name), unchecked: p.Unchecked}
		for _, f := range p.Findings {
			l.broken = append(l.broken, f.String())
		}
		switch p.Name {
		case "S2":
			l.figures += fmt.Sprintf("; of %s double clicks none bought twice", figure.Count(report.SecondClicks))
			if comparison.Contradictions > 0 {
				l.broken = append(l.broken, fmt.Sprintf("%d buyers got more than one order", comparison.Contradictions))
			}
		case "S5":
			l.figures = d.crashFigures(comparison)
			l.broken = append(l.broken, lost(report, comparison)...)
		case "S7", "DB":
			if p.Kept() {
				continue // the demo does not show these; report them only if they are not kept
			}
		}
		lines = append(lines, l)
	}
	return d.story.verdict(lines)
}

// crashFigures returns the figures that show that the killed worker lost no order.
func (d *demo) crashFigures(c crowd.Comparison) string {
	return fmt.Sprintf("kill -9 with %s pending orders; %s accepted, %s found in Postgres, one by one",
		figure.Count(d.crash.orphans), figure.Count(c.Accepted), figure.Count(c.Found))
}

// lost lists the broken promises to the crowd.
func lost(report crowd.Report, c crowd.Comparison) (broken []string) {
	if !c.Holds() {
		broken = append(append(broken, c.String()), c.Examples...)
	}
	if c.Refused > 0 {
		broken = append(broken, fmt.Sprintf("%d orders were accepted and refused later", c.Refused))
	}
	if c.Voided > 0 {
		broken = append(broken, fmt.Sprintf("%d orders were accepted and voided, though Redis was not lost", c.Voided))
	}
	for problem, n := range report.Failures {
		broken = append(broken, fmt.Sprintf("%d clicks ended without a valid answer: %s", n, problem))
	}
	return broken
}

// verdict prints the lines. It returns ErrBroken if a promise is broken, and otherwise ErrUnchecked if
// one could not be checked.
func (s *story) verdict(lines []promiseLine) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var err error
	for _, l := range lines {
		mark := "✓"
		switch {
		case len(l.broken) > 0:
			mark, err = "✗", ErrBroken
		case len(l.unchecked) > 0:
			mark, err = "?", cmp.Or(err, ErrUnchecked)
		}
		_, _ = fmt.Fprintf(s.out, "%s %s  %-34s %s\n", mark, l.promise, l.says, l.figures)
		for _, b := range l.broken {
			_, _ = fmt.Fprintf(s.out, "      - %s\n", b)
		}
		for _, why := range l.unchecked {
			_, _ = fmt.Fprintf(s.out, "      ? not checked: %s\n", figure.Printable(why))
		}
	}
	_, _ = io.WriteString(s.out, map[error]string{
		nil: "\nEvery promise was kept.\n", ErrBroken: "\nA PROMISE IS BROKEN.\n",
		ErrUnchecked: "\nNOT EVERY PROMISE COULD BE CHECKED.\n",
	}[err])
	return err
}
