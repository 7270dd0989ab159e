package dashboard

import (
	"errors"
	"net/http"

	"stampede/ledger/deadletter"
	"stampede/relay/target"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/reservation/problems"
	"stampede/sql"
	"stampede/upkeep/audit"
	"stampede/upkeep/rebuild"
)

// A refusal is an answer of the dashboard itself to what an operator wants.
type refusal struct{ text, hint string }

func (r *refusal) Error() string { return r.text }

// explanations are for errors that only a dashboard meets. Those of sales and orders are in package problems.
var explanations = []struct {
	err        error
	status     int
	text, hint string
}{
	{target.ErrNotFound, http.StatusNotFound, "There is no such target.", "Look for it in the list."},
	{
		target.ErrPlace, http.StatusUnprocessableEntity, "There is no such place among the events.",
		"Nothing was done. Write start, now, a time such as 2026-11-23T20:00:00Z, or the id of an event.",
	},
	{deadletter.ErrNotFound, http.StatusNotFound, "There is no such dead letter.", "Look for it in the list."},
	{
		order.ErrNotUnclear, http.StatusConflict, "The payment is not unclear.",
		"Nothing was done. Another operator may have been faster, or its report was repeated and can be read now.",
	},
	{
		deadletter.ErrNotParked, http.StatusConflict, "This dead letter was replayed or discarded before.",
		"Look at it: it says by whom, and what became of it.",
	},
	{
		deadletter.ErrUnreadable, http.StatusConflict, "The stored fields of this dead letter are damaged.",
		"It cannot be replayed. Discard it, and run a dry run of reconcile.",
	},
	{
		audit.ErrRunning, http.StatusConflict,
		"Another process is reconciling.", "Wait for its end, and begin again with a dry run.",
	},
	{rebuild.ErrRunning, http.StatusConflict, "A rebuild is under way.", "Wait for its end, and try again."},
	{
		sql.ErrNotMigrated, http.StatusServiceUnavailable, "The database is of an older version.", "Run stampede migrate up.",
	},
	{
		sql.ErrSchemaAhead, http.StatusServiceUnavailable, "The database is of a newer version.", "Run a newer dashboard.",
	},
}

// explain says to an operator what is wrong and what to do, and which status that is. What cannot be explained stays in
// the log.
func explain(err error) (text, hint string, status int) {
	var (
		own     *refusal
		invalid *order.InvalidError
		illegal *reservation.IllegalTransitionError
		taken   *catalog.TakenError
		step    *order.TransitionError
		other   *order.RefundedError
	)
	switch {
	case errors.As(err, &own):
		return own.text, own.hint, http.StatusUnprocessableEntity
	case errors.As(err, &invalid):
		return "The " + invalid.Field + " " + invalid.Reason + ".", "Correct it, and send the form again. Nothing was done.",
			http.StatusUnprocessableEntity
	case errors.As(err, &illegal):
		return "You " + illegal.Error() + ".", "Nothing was done. Another operator may have been faster: see the history.",
			http.StatusConflict
	case errors.As(err, &taken) && taken.Items != "":
		what := "So many units cannot be removed: " + itemsText(taken.Items) + " are taken, the lowest possible stock."
		return what, "Nothing was done. Remove fewer.", http.StatusConflict
	case errors.As(err, &taken):
		return "So many units cannot be removed: " + count(taken.Taken) + " are taken, which is the lowest possible stock.",
			"Nothing was done. Remove fewer.", http.StatusConflict
	case errors.As(err, &other):
		return "The payment was refunded before, with the reference " + other.RefundReference + ".",
			"Nothing was done. If money went back twice, only the payment provider can say so.", http.StatusConflict
	case errors.As(err, &step):
		what := "The order is " + string(step.Status) + ", which does not allow this."
		return what, "Nothing was done.", http.StatusConflict
	}
	for _, e := range explanations {
		if errors.Is(err, e.err) {
			return e.text, e.hint, e.status
		}
	}
	for _, known := range problems.All() {
		if known.Text != "" && errors.Is(err, known.Err) {
			return known.Text, known.Hint, known.Status
		}
	}
	return "A server does not answer, or something unexpected happened.",
		"Look at the overview for what is wrong, and at the log of the dashboard for details.", http.StatusServiceUnavailable
}
