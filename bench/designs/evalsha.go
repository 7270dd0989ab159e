package designs

import (
	"context"

	"stampede/bench/front"
)

// evalsha is stockStream without its consumers: the cost of accepting each order with its own script
// call. Our script, which decides a whole batch in a call, is compared with it.
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
