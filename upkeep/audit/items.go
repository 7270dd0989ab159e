package audit

import (
	"fmt"
	"strconv"

	"stampede/reservation/order"
)

// itemInRedis is what Redis has of an item. The limit is 0 if it has none of its own.
type itemInRedis struct{ left, stock, limit int64 }

// itemFields are the fields of the items, in the order in which readItems reads them.
func (s auditedSale) itemFields() []string {
	if len(s.items) == 0 {
		return nil
	}
	fields := []string{"limit"}
	for item := range s.items {
		letter := order.ItemLetter(item)
		fields = append(fields, "left."+letter, "stock."+letter, "limit."+letter)
	}
	return fields
}

// readItems reads the fields of itemFields. It returns an error for the first that is damaged. In a closed sale the
// units are 0.
func (s *redisShard) readItems(fields []any, closed bool) error {
	s.orderLimit, s.redisItems = nil, nil
	numbers := make([]int64, len(fields))
	for i, field := range fields {
		name := s.itemFields()[i]
		text, is := field.(string)
		if isLimit := i > 0 && i%3 == 0; !is && (closed || isLimit) {
			continue
		}
		if !is {
			return fmt.Errorf("%s is missing", name)
		}
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil || strconv.FormatInt(n, 10) != text || n < 0 && i%3 != 1 || n > numberMax || n < -numberMax {
			return fmt.Errorf("%s is %.50q", name, text)
		}
		numbers[i] = n
	}
	if len(numbers) > 0 && !closed {
		s.orderLimit = &numbers[0]
	}
	for ; len(numbers) > 3; numbers = numbers[3:] {
		s.redisItems = append(s.redisItems, itemInRedis{numbers[1], numbers[2], numbers[3]})
	}
	return nil
}

// hasItems reports whether an order of the sale can have these lines.
func (s auditedSale) hasItems(lines order.Lines) bool {
	for item := range lines.Each() {
		if item >= len(s.items) {
			return false
		}
	}
	return (lines != "") == (len(s.items) > 0)
}
