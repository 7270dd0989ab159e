package demo

import (
	"context"

	"stampede/internal/crowd"
)

func (d *demo) judge(ctx context.Context, report crowd.Report, comparison crowd.Comparison) error {
	return nil
}
