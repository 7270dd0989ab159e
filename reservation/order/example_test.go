package order_test

import (
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"

	"stampede/reservation/order"
)

// A handler of any Watermill subscriber on the stream of orders gets such messages.
func ExampleDecodeReserved() {
	msg := message.NewMessage("AaH9eHpfdXukBQzkOOCaFQ", []byte("ann\n"+
		"AaH9eHpfdXukBQzkOOCaFQ 1 17 1a0c2d3e4f5\n"+
		"bob\n"+
		"AaH9eHpfdXukBQzkOeCaFQ 2 18 1a0c2d3e4f5"))
	msg.Metadata = message.Metadata{
		"event": "OrderReserved", "event_version": "2", "sale_id": "01a1fd78-7a5f-757b-a405-0ce438009a15",
		"epoch": "1", "count": "2",
	}

	events, err := order.DecodeReserved(msg)
	if err != nil {
		fmt.Println(err) // errors.Is(err, order.ErrUndecodable): retries do not help
		return
	}
	for _, e := range events {
		fmt.Println(e.OrderID, e.UserID, e.Quantity, e.Sequence, e.ReservedAt)
	}
	// Output:
	// 01a1fd78-7a5f-757b-a405-0ce438e09a15 ann 1 17 2026-09-21 07:17:41.749 +0000 UTC
	// 01a1fd78-7a5f-757b-a405-0ce439e09a15 bob 2 18 2026-09-21 07:17:41.749 +0000 UTC
}
