package dashboard

import (
	"context"
	"errors"
	"net/http"

	"stampede/internal/pg"
	"stampede/ledger/deadletter"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/sql"
	"stampede/upkeep/audit"
	"stampede/upkeep/rebuild"
)

// A refusal is an answer of the dashboard itself to what an operator wants.
type refusal struct{ text, hint string }

func (r *refusal) Error() string { return r.text }

// explanations are for errors without details, in this order: an error may be several.
var explanations = []struct {
	err        error
	status     int
	text, hint string
}{
	{
		catalog.ErrIdempotencyKeyReused, http.StatusConflict, "This form was sent before with another number of units.",
		"Nothing more was changed. Look at the stock and the history, and fill in the form again if it is still needed.",
	},
	{
		catalog.ErrRestockUndecided, http.StatusServiceUnavailable, "Redis does not answer: the lower stock is recorded.",
		"It takes effect when Redis grants it. The history shows what became of it.",
	},
	{
		catalog.ErrRestockWithdrawn, http.StatusConflict, "The stock was rebuilt before it could be lowered.",
		"Nothing was changed. Repeat it if it is still needed.",
	},
	{
		pg.ErrChangeUnknown, http.StatusServiceUnavailable, "Postgres did not answer: the change may have been made.",
		"Look at the history of the sale. To be sure, repeat it: a repeat changes nothing twice.",
	},
	{
		catalog.ErrNotInForce, http.StatusServiceUnavailable, "The change is recorded, and Redis does not answer.",
		"A worker puts it in force when Redis answers. You need not repeat it.",
	},
	{reservation.ErrSaleNotFound, http.StatusNotFound, "There is no such sale.", "Look for it in the list of sales."},
	{
		order.ErrNotFound, http.StatusNotFound, "Postgres has no such order.",
		"An order of the last seconds may be in Redis: give its user as well.",
	},
	{
		order.ErrArchived, http.StatusGone,
		"The orders of this sale are archived.", "stampede audit --archive reads the file.",
	},
	{order.ErrTooWide, http.StatusBadRequest, "A list of orders needs a user or a sale.", "Fill in one of them."},
	{deadletter.ErrNotFound, http.StatusNotFound, "There is no such dead letter.", "Look for it in the list."},
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
	{
		reservation.ErrUnavailable, http.StatusServiceUnavailable,
		"A server does not answer, or the sale waits for a rebuild.",
		"Look at the overview: it says which. Nothing is known to have been done.",
	},
	{
		context.DeadlineExceeded, http.StatusServiceUnavailable, "The servers did not answer in time.",
		"Look at the overview, and whether the change was made, before you repeat it.",
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
	case errors.As(err, &taken):
		return "So many units cannot be removed: " + count(taken.Taken) + " are taken, which is the lowest possible stock.",
			"Nothing was done. Remove fewer.", http.StatusConflict
	case errors.As(err, &step):
		what := "The order is " + string(step.Status) + ", which does not allow this."
		return what, "Nothing was done.", http.StatusConflict
	}
	for _, e := range explanations {
		if errors.Is(err, e.err) {
			return e.text, e.hint, e.status
		}
	}
	return "A server does not answer, or something unexpected happened.",
		"Look at the overview for what is wrong, and at the log of the dashboard for details.", http.StatusServiceUnavailable
}
