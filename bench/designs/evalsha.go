package designs

import (
	"context"

	"stampede/bench/front"
)

// evalsha is stockStream without its consumers: what it costs to accept an order by one script call for
// each buyer. It is what our script for a whole batch is to be compared with.
type evalsha struct{ *stockStream }

func newEvalsha(ctx context.Context, b front.Backend) (front.Design, error) {
	stock, err := openRedisStock(ctx, b, 1)
	if err != nil {
		return nil, err
	}
	return evalsha{&stockStream{redisStock: stock}}, nil
}

// Run implements front.Design.
func (evalsha) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}
