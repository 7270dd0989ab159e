package demo

import (
	"cmp"
	"context"
	"fmt"
	"io"

	"github.com/google/uuid"

	"stampede/internal/dev/crowd"
	"stampede/internal/figure"
	"stampede/upkeep/audit"
)

// Verdict is what the audit and the crowd found.
type Verdict struct {
	Sale uuid.UUID `json:"sale_id"`
	// Kept is whether every promise was checked and kept.
	Kept     bool             `json:"kept"`
	Promises []Promise        `json:"promises"`
	Crowd    crowd.Report     `json:"crowd"`
	Checked  crowd.Comparison `json:"checked"`
}

// Promise is one promise of the verdict, with its figures or what breaks it.
type Promise struct {
	Name    string   `json:"name"`
	Says    string   `json:"says"`
	Figures string   `json:"figures"`
	Broken  []string `json:"broken,omitempty"`
	// Unchecked lists why it could not be checked completely.
	Unchecked []string `json:"unchecked,omitempty"`
}

// judge audits the sale after the crowd, adds the comparison, and prints the verdict.
func (d *demo) judge(ctx context.Context, report crowd.Report, comparison crowd.Comparison) error {
	audited, err := audit.Run(ctx, audit.Config{
		Pool: d.pool, Redis: d.redis, Keys: d.keys, Wait: arrivalPatience, Sale: d.sale,
	})
	if err != nil {
		return err
	}
	var lines []Promise
	for _, p := range audited.Promises {
		l := Promise{Name: p.Name, Says: p.Says, Figures: audited.Figures(p.Name), Unchecked: p.Unchecked}
		for _, f := range p.Findings {
			l.Broken = append(l.Broken, f.String())
		}
		switch p.Name {
		case "S2":
			l.Figures += fmt.Sprintf("; of %s double clicks none bought twice", figure.Count(report.SecondClicks))
			if comparison.Contradictions > 0 {
				l.Broken = append(l.Broken, fmt.Sprintf("%d buyers got more than one order", comparison.Contradictions))
			}
		case "S5":
			l.Figures = d.crashFigures(comparison)
			l.Broken = append(l.Broken, lost(report, comparison)...)
		case "S7", "S8", "DB":
			if p.Kept() {
				continue // the demo does not show these; report them only if they are not kept
			}
		}
		lines = append(lines, l)
	}
	err = d.story.verdict(lines)
	if d.config.Verdict != nil {
		err = cmp.Or(d.config.Verdict(Verdict{d.sale, err == nil, lines, report, comparison}), err)
	}
	return err
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
func (s *story) verdict(lines []Promise) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var err error
	for _, l := range lines {
		mark := "✓"
		switch {
		case len(l.Broken) > 0:
			mark, err = "✗", ErrBroken
		case len(l.Unchecked) > 0:
			mark, err = "?", cmp.Or(err, ErrUnchecked)
		}
		_, _ = fmt.Fprintf(s.out, "%s %s  %-34s %s\n", mark, l.Name, l.Says, l.Figures)
		for _, b := range l.Broken {
			_, _ = fmt.Fprintf(s.out, "      - %s\n", b)
		}
		for _, why := range l.Unchecked {
			_, _ = fmt.Fprintf(s.out, "      ? not checked: %s\n", figure.Printable(why))
		}
	}
	_, _ = io.WriteString(s.out, map[error]string{
		nil: "\nEvery promise was kept.\n", ErrBroken: "\nA PROMISE IS BROKEN.\n",
		ErrUnchecked: "\nNOT EVERY PROMISE COULD BE CHECKED.\n",
	}[err])
	return err
}
