package dashboard

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"time"

	"stampede/internal/figure"
	"stampede/relay/target"
)

// targetsPage is the body of the list of the relay's targets, and of the page of one.
type targetsPage struct {
	Rows []targetRow
	Path string // of the page, from which an open one asks for its rows again
}

// targetRow is a target as pages show it: its URL without secrets.
type targetRow struct {
	target.Standing
	Kind, Address string
	Behind        int64
	Waits         time.Duration
	// Last and Failed are the times of the last delivery and of the last error.
	Last, Failed, Retry time.Time
}

func newTargetRow(t target.Standing, now time.Time) targetRow {
	kind := unknown
	if to, err := target.ParseAddress(t.URL); err == nil {
		kind = string(to.Kind)
	}
	return targetRow{
		t, kind, figure.Printable(target.Redacted(t.URL)), t.Lag(), t.Waiting(now),
		time.Time(t.DeliveredAt), time.Time(t.LastErrorAt), time.Time(t.RetryAt),
	}
}

// targetPages are the pages of the relay's targets, and the actions on them.
type targetPages struct {
	*site
	targets *target.Store
}

// list shows all targets, or the one of the path.
func (d targetPages) list(ctx context.Context, r *http.Request) (page, error) {
	all, err := d.targets.List(ctx)
	p, title, name := targetsPage{Path: r.URL.Path}, "Targets", r.PathValue("target")
	if name != "" {
		title = "Target " + name
		all = slices.DeleteFunc(all, func(t target.Standing) bool { return t.Name != name })
		if err == nil && len(all) == 0 {
			err = target.ErrNotFound
		}
	}
	for _, t := range all {
		p.Rows = append(p.Rows, newTargetRow(t, time.Now()))
	}
	if err == nil && r.URL.Query().Has("rows") {
		return page{part: "targetrows", body: p}, nil
	}
	if name != "" {
		return page{template: "target", title: title, body: p}, err
	}
	return page{template: "targets", title: title, body: p}, err
}

// change returns the handler of a form that changes a target.
func (d targetPages) change(
	name string, do func(ctx context.Context, form url.Values, name string) (string, error),
) sessionHandler {
	return d.act(bulkTimeout, func(ctx context.Context, r *http.Request, _ string) (action, error) {
		one := r.PathValue("target")
		return action{name, []any{"target", one}, "/targets/" + url.PathEscape(one), func() (string, error) {
			return do(ctx, r.PostForm, one)
		}}, nil
	})
}

func (d targetPages) pause(ctx context.Context, _ url.Values, name string) (string, error) {
	return "The target is paused: it gets no events until it is resumed, and misses none.",
		d.targets.SetState(ctx, name, target.Paused)
}

func (d targetPages) resume(ctx context.Context, _ url.Values, name string) (string, error) {
	return "The target gets events.", d.targets.SetState(ctx, name, target.Active)
}

// replay moves the position of a target, as stampede relay replay does.
func (d targetPages) replay(ctx context.Context, form url.Values, name string) (string, error) {
	if field(form, "name") != name {
		return "", &refusal{"That is not the name of this target.", "Nothing was done. Type it as it stands on the page."}
	}
	place, find := field(form, "place"), target.PositionAt
	if form.Get("how") == "after" {
		find = target.EventPosition
	}
	position, err := find(ctx, d.Pool, place)
	if form.Get("how") == "after" && errors.Is(err, target.ErrPlace) {
		return "", &refusal{
			"There is no such event.", "Nothing was done. Write the id of an event. Start, now and a time go with \"from\".",
		}
	}
	if err != nil {
		return "", err
	}
	was, err := d.targets.SetPosition(ctx, name, position)
	return "The target " + target.Replay(was, position, count(position)) + ".", err
}
