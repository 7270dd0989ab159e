package dashboard

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"stampede/dashboard/session"
	"stampede/ledger/deadletter"
	"stampede/reservation/order"
)

// bulkMax bounds the dead letters of one action.
const bulkMax = 100

// bulkTimeout bounds one action on many letters; what was not done then is said.
const bulkTimeout = 60 * time.Second

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

func (d *Dashboard) showLetters(w http.ResponseWriter, r *http.Request, s *session.Session) {
	page := lettersPage{Status: r.URL.Query().Get("status"), Statuses: letterStatuses, Max: bulkMax}
	if !slices.Contains(letterStatuses, page.Status) {
		page.Status = letterStatuses[0]
	}
	page.Parked = page.Status == letterStatuses[0]
	status := deadletter.Status(page.Status)
	if page.Status == "all" {
		status = ""
	}
	ctx, cancel := context.WithTimeout(r.Context(), lookTimeout)
	defer cancel()
	rows, err := d.letters.List(ctx, status, bulkMax)
	if err != nil {
		d.fail(w, r, s, err)
		return
	}
	page.Rows = rows
	d.render(w, r, s, http.StatusOK, "letters", "Dead letters", page)
}

// letterPage is the body of the page of a dead letter.
type letterPage struct {
	deadletter.Letter
	Orders []order.OrderReserved
	Parked bool
}

func (d *Dashboard) showLetter(w http.ResponseWriter, r *http.Request, s *session.Session) {
	id, err := strconv.ParseInt(r.PathValue("letter"), 10, 64)
	if err != nil {
		d.fail(w, r, s, deadletter.ErrNotFound)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), lookTimeout)
	defer cancel()
	l, err := d.letters.Get(ctx, id)
	if err != nil {
		d.fail(w, r, s, err)
		return
	}
	page := letterPage{Letter: l, Parked: l.Status == deadletter.StatusParked}
	if l.Damage == "" {
		page.Orders, _ = deadletter.OrdersOf(l.Entry) // of one that names no order, none
	}
	d.render(w, r, s, http.StatusOK, "letter", fmt.Sprintf("Dead letter %d", id), page)
}

// resolveLetters replays or discards letters. Each is an action of its own: one that fails does not stop the others.
func (d *Dashboard) resolveLetters(w http.ResponseWriter, r *http.Request, s *session.Session) {
	if !d.readForm(w, r, s) {
		return
	}
	to := "/letters"
	if id, err := strconv.ParseInt(r.PostForm.Get("back"), 10, 64); err == nil {
		to += "/" + strconv.FormatInt(id, 10)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), bulkTimeout)
	defer cancel()
	what := r.PostForm.Get("do")
	d.act(w, r, s, what+" letters", to, []any{"letters", strings.Join(r.PostForm["id"], ",")}, func() (string, error) {
		ids, err := letterIDs(r.PostForm["id"])
		if err != nil {
			return "", err
		}
		switch reason := strings.TrimSpace(r.PostForm.Get("reason")); {
		case what == "replay":
			return eachLetter(ids, "is in its stream again", "are in their streams again", func(id int64) error {
				_, appended, err := d.letters.Replay(ctx, id, s.Person().Name)
				if err == nil && !appended {
					return &refusal{"it was replayed before, and is not parked again.", ""}
				}
				return err
			})
		case what != "discard":
			return "", &refusal{"The form is damaged.", "Nothing was done. Load the page again."}
		case reason == "":
			return "", &refusal{"Say why they are discarded.", "Nothing was done. The reason is stored with each."}
		default:
			if err := order.ValidateReason(reason); err != nil {
				return "", err
			}
			return eachLetter(ids, "is discarded", "are discarded", func(id int64) error {
				return d.letters.Discard(ctx, id, reason, s.Person().Name)
			})
		}
	})
}

func letterIDs(texts []string) (ids []int64, err error) {
	for _, text := range texts {
		id, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return nil, &refusal{"The form is damaged.", "Nothing was done. Load the page again."}
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

// eachLetter says what became of all, and of the first ones that failed.
func eachLetter(ids []int64, one, more string, do func(id int64) error) (string, error) {
	const saidMax = 5
	var failed []string
	done := 0
	for _, id := range ids {
		err := do(id)
		if err == nil {
			done++
			continue
		}
		text, _, _ := explain(err)
		if own, ok := errors.AsType[*refusal](err); ok {
			text = own.text
		}
		failed = append(failed, fmt.Sprintf("%d: %s", id, text))
	}
	said := fmt.Sprintf("%s dead letters %s.", count(done), more)
	if done == 1 {
		said = "One dead letter " + one + "."
	}
	if len(failed) == 0 {
		return said, nil
	}
	hint := strings.Join(failed[:min(len(failed), saidMax)], " ")
	if rest := len(failed) - saidMax; rest > 0 {
		hint += fmt.Sprintf(" And %d more.", rest)
	}
	return "", &refusal{fmt.Sprintf("%s %s failed.", said, count(len(failed))), hint}
}
