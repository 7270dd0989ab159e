package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"stampede/internal/figure"
	"stampede/reservation/catalog"
)

type saleHistoryCmd struct {
	look
	catalogFlags
	saleArg
	Limit int `default:"1000" env:"STAMPEDE_SALE_LIMIT" placeholder:"N" help:"Most changes to show, the newest ones (${default})."`
}

func (c *saleHistoryCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	if err := wantAtLeast("--limit", c.Limit, 1); err != nil {
		return err
	}
	var changes []catalog.Change
	err := c.open(ctx, logger, func(sales saleStore) (err error) {
		changes, err = sales.History(ctx, c.Sale, c.Limit)
		return err
	})
	if err != nil {
		return err
	}
	if c.json() {
		for _, change := range changes {
			if err := writeJSON(s.out, change.View()); err != nil {
				return err
			}
		}
		return nil
	}
	t := tabwriter.NewWriter(s.out, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "TIME\tREVISION\tCHANGE\tOPERATOR\tDETAILS") // Flush returns the error
	for _, change := range changes {
		_, _ = fmt.Fprintf(t, "%s\t%d\t%s\t%s\t%s\n", orDash(change.OccurredAt), change.Revision, change.Name(),
			orNobody(change.Operator), details(change.Data))
	}
	return t.Flush()
}

// listedMax is how many members of a list details shows: a reconcile may have appended thousands of orders.
const listedMax = 3

// details returns the members of a JSON object for people, in the order of their names. Of a list it shows the first
// members and how many there are; --output json has all.
func details(data []byte) string {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(data, &members); err != nil {
		return printable(string(data))
	}
	var texts []string
	for _, name := range slices.Sorted(maps.Keys(members)) {
		value := printable(string(members[name]))
		var text string
		var list []json.RawMessage
		switch {
		case json.Unmarshal(members[name], &text) == nil:
			value = printable(text)
			if strings.ContainsAny(text, " ,=") {
				value = fmt.Sprintf("%q", text)
			}
		case json.Unmarshal(members[name], &list) == nil && len(list) > listedMax:
			value = beginning(list)
		}
		texts = append(texts, name+"="+value)
	}
	return strings.Join(texts, " ")
}

// beginning returns the first members of a long list.
func beginning(list []json.RawMessage) string {
	first, _ := json.Marshal(list[:listedMax]) // they were JSON
	shown := printable(strings.TrimSuffix(string(first), "]"))
	return fmt.Sprintf("%s… (%s in all)", shown, figure.Count(int64(len(list))))
}
