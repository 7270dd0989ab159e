package dashboard

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"stampede/ledger/deadletter"
	"stampede/reservation/order"
)

// lettersPage is the body of the list of dead letters.
type lettersPage struct {
	Status   string
	Statuses []string
	Rows     []deadletter.Letter
	Max      int
	Parked   bool
}

// letterStatuses are those that can be listed, the first by default.
var letterStatuses = []string{"parked", "replayed", "discarded", "all"}

// letterPages are the pages of dead letters, and the actions on them.
type letterPages struct {
	*site
	letters *deadletter.Store
}

func (d letterPages) list(ctx context.Context, r *http.Request) (page, error) {
	p := lettersPage{Status: r.URL.Query().Get("status"), Statuses: letterStatuses, Max: bulkMax}
	if !slices.Contains(letterStatuses, p.Status) {
		p.Status = letterStatuses[0]
	}
	p.Parked = p.Status == letterStatuses[0]
	status := deadletter.Status(p.Status)
	if p.Status == "all" {
		status = ""
	}
	var err error
	p.Rows, err = d.letters.List(ctx, status, bulkMax)
	return page{template: "letters", title: "Dead letters", body: p}, err
}

// letterPage is the body of the page of a dead letter.
type letterPage struct {
	deadletter.Letter
	Orders []order.OrderReserved
	Parked bool
}

func (d letterPages) show(ctx context.Context, r *http.Request) (page, error) {
	id, err := strconv.ParseInt(r.PathValue("letter"), 10, 64)
	if err != nil {
		return page{}, deadletter.ErrNotFound
	}
	l, err := d.letters.Get(ctx, id)
	p := letterPage{Letter: l, Parked: l.Status == deadletter.StatusParked}
	if err == nil && l.Damage == "" {
		p.Orders, _ = deadletter.OrdersOf(l.Entry) // of one that names no order, none
	}
	return page{template: "letter", title: fmt.Sprintf("Dead letter %d", id), body: p}, err
}

// resolve replays or discards letters. Each is an action of its own: one that fails does not stop the others.
func (d letterPages) resolve(ctx context.Context, r *http.Request, operator string) (action, error) {
	form := r.PostForm
	to := "/letters"
	if id, err := strconv.ParseInt(form.Get("back"), 10, 64); err == nil {
		to += "/" + strconv.FormatInt(id, 10)
	}
	what := form.Get("do")
	return action{what + " letters", []any{"letters", strings.Join(form["id"], ",")}, to, func() (string, error) {
		ids, err := letterIDs(form["id"])
		if err != nil {
			return "", err
		}
		switch reason := field(form, "reason"); {
		case what == "replay":
			return each(ids, lettersSaid("is in its stream again", "are in their streams again"), func(id int64) error {
				_, appended, err := d.letters.Replay(ctx, id, operator)
				if err == nil && !appended {
					return &refusal{"it was replayed before, and is not parked again.", ""}
				}
				return err
			})
		case what != "discard":
			return "", errForm
		case reason == "":
			return "", &refusal{"Say why they are discarded.", "Nothing was done. The reason is stored with each."}
		default:
			if err := order.ValidateReason(reason); err != nil {
				return "", err
			}
			return each(ids, lettersSaid("is discarded", "are discarded"), func(id int64) error {
				return d.letters.Discard(ctx, id, reason, operator)
			})
		}
	}}, nil
}

func letterIDs(texts []string) (ids []int64, err error) {
	for _, text := range texts {
		id, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return nil, errForm
		}
		ids = append(ids, id)
	}
	slices.Sort(ids)
	ids = slices.Compact(ids)
	switch {
	case len(ids) == 0:
		return nil, &refusal{"No dead letter is selected.", "Nothing was done. Select some, up to " + count(bulkMax) + "."}
	case len(ids) > bulkMax:
		return nil, &refusal{
			"Too many dead letters are selected.", "Nothing was done. Select at most " + count(bulkMax) + ".",
		}
	}
	return ids, nil
}

// lettersSaid says what became of a number of letters.
func lettersSaid(one, more string) func(n int) string {
	return func(n int) string {
		if n == 1 {
			return "One dead letter " + one + "."
		}
		return count(n) + " dead letters " + more + "."
	}
}
