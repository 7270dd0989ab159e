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

// line is one promise of the verdict, with the figures that prove it or what breaks it.
type line struct {
	promise string
	says    string
	figures string
	broken  []string
	// unchecked tells why it could not be looked at wholly.
	unchecked []string
}

// judge audits the sale at rest, holds the crowd's ledger against Postgres, and prints the verdict.
func (d *demo) judge(ctx context.Context, report crowd.Report, comparison crowd.Comparison) error {
	audit, err := audit.Run(ctx, audit.Config{
		Pool: d.pool, Redis: d.redis, Keys: d.keys, Wait: arrivalPatience, Sale: d.sale,
	})
	if err != nil {
		return err
	}
	var lines []line
	for _, p := range audit.Promises {
		l := line{promise: p.Name, says: p.Says, figures: audit.Figures(p.Name), unchecked: p.Unchecked}
		for _, f := range p.Findings {
			l.broken = append(l.broken, f.String())
		}
		switch p.Name {
		case "S2":
			l.figures += fmt.Sprintf("; of %s double clicks none bought twice", figure.Count(report.SecondClicks))
			if comparison.Contradictions > 0 {
				l.broken = append(l.broken, fmt.Sprintf("%d buyers were given more than one order", comparison.Contradictions))
			}
		case "S5":
			l.figures = d.crashFigures(comparison)
			l.broken = append(l.broken, lost(report, comparison)...)
		case "S7", "DB":
			if p.Kept() {
				continue // not what this demo tries; but a broken promise is never passed over
			}
		}
		lines = append(lines, l)
	}
	return d.story.verdict(lines)
}

// crashFigures is what shows that the killed worker took no order along.
func (d *demo) crashFigures(c crowd.Comparison) string {
	return fmt.Sprintf("kill -9 with %s orders in hand; %s accepted, %s found in Postgres, one by one",
		figure.Count(d.crash.orphans), figure.Count(c.Accepted), figure.Count(c.Found))
}

// lost says what the crowd misses.
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
		broken = append(broken, fmt.Sprintf("%d clicks ended without a proper answer: %s", n, problem))
	}
	return broken
}

// verdict prints the lines. It returns ErrBroken if any promise is, and otherwise ErrUnchecked if
// one could not be looked at.
func (s *story) verdict(lines []line) error {
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
			_, _ = fmt.Fprintf(s.out, "      ? could not look: %s\n", figure.Printable(why))
		}
	}
	_, _ = io.WriteString(s.out, map[error]string{
		nil: "\nEvery promise was kept.\n", ErrBroken: "\nA PROMISE IS BROKEN.\n",
		ErrUnchecked: "\nNOT EVERY PROMISE COULD BE CHECKED.\n",
	}[err])
	return err
}
