package fulfillment_test

import (
	"encoding/binary"
	"io"
	"maps"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/order"
)

// model is a correct sale with a payment window: nothing fails, and each step ends before the next one begins.
type model struct {
	items  bool    // of a sale with items; otherwise the stock is that of the only thing
	stock  []int64 // of each item
	state  reservation.State
	orders map[uuid.UUID]modelOrder
	holds  map[string]uuid.UUID // the live order of each user
}

type modelOrder struct {
	user, key, reference string
	quantity             int64
	lines                order.Lines // in a sale with items
	status               order.Status
	version              int
}

// wanted returns the units of each item that a request wants.
func (m *model) wanted(r reservation.Request) []int64 {
	if !m.items {
		return []int64{r.Quantity}
	}
	units := make([]int64, len(m.stock))
	for i := range units {
		units[i] = r.Items[order.ItemLetter(i)]
	}
	return units
}

// ordered returns the order that a request makes.
func (m *model) ordered(r reservation.Request) modelOrder {
	o := modelOrder{user: r.User, key: r.IdempotencyKey, quantity: r.Quantity, status: order.StatusConfirmed, version: 2}
	if m.items {
		o.lines = order.MakeLines(m.wanted(r))
		o.quantity = o.lines.Units()
	}
	return o
}

// left returns the units of each item that no live order has.
func (m *model) left() []int64 {
	left := slices.Clone(m.stock)
	for o := range maps.Values(m.orders) {
		if o.status.Live() && !m.items {
			left[0] -= o.quantity
		} else if o.status.Live() {
			for item, units := range o.lines.Each() {
				left[item] -= units
			}
		}
	}
	return left
}

// wantsSoldOut reports whether nothing is left of an item that the request wants.
func (m *model) wantsSoldOut(r reservation.Request) bool {
	wanted, left := m.wanted(r), m.left()
	for i, units := range wanted {
		if units > 0 && left[i] == 0 {
			return true
		}
	}
	return false
}

// verdict returns the answer to a purchase, and the id of an existing order if the verdict names one.
func (m *model) verdict(r reservation.Request) (reservation.Verdict, uuid.UUID) {
	wants := m.ordered(r)
	for id, o := range m.orders {
		if r.IdempotencyKey == "" || o.user != r.User || o.key != r.IdempotencyKey {
			continue
		}
		switch {
		case o.quantity != wants.quantity || o.lines != wants.lines:
			return reservation.KeyReused, uuid.Nil
		case o.status.Live():
			return reservation.Replayed, id
		default:
			return reservation.OrderEnded, id
		}
	}
	if id, holds := m.holds[r.User]; holds {
		return reservation.AlreadyPurchased, id
	}
	switch {
	case m.state == reservation.StatePaused:
		return reservation.Paused, uuid.Nil
	case wants.quantity > modelPerOrder || m.items && m.wanted(r)[0] > modelPerFirst:
		return reservation.OverLimit, uuid.Nil
	}
	left := m.left()
	for i, units := range m.wanted(r) {
		if units > left[i] {
			return reservation.SoldOut, uuid.Nil
		}
	}
	return reservation.Reserved, uuid.Nil
}

func (m *model) reserve(r reservation.Request, id uuid.UUID) {
	m.orders[id] = m.ordered(r)
	m.holds[r.User] = id
}

// step applies an allowed step to an order.
func (m *model) step(id uuid.UUID, to order.Status, reference string) {
	o := m.orders[id]
	o.status, o.reference, o.version = to, reference, o.version+1
	m.orders[id] = o
	if !to.Live() {
		delete(m.holds, o.user)
	}
}

// lose removes orders that Redis loses before a worker has read them.
func (m *model) lose(ids []uuid.UUID) {
	for _, id := range ids {
		delete(m.holds, m.orders[id].user)
		delete(m.orders, id)
	}
}

// units returns the units of the orders with this status.
func (m *model) units(status order.Status) (n int64) {
	for o := range maps.Values(m.orders) {
		if o.status == status {
			n += o.quantity
		}
	}
	return n
}

func sum(units []int64) (all int64) {
	for _, n := range units {
		all += n
	}
	return all
}

// cutOff is a proxy between clients and Postgres. After a certain statement it forwards nothing more of that
// connection and keeps both sides open: for Postgres the client has vanished in the middle of a batch, although its
// kernel still answers keepalives.
type cutOff struct {
	after    string
	happened chan struct{} // closed when a connection was cut off
	once     sync.Once
}

// cutOffAfter returns a URL of the test's database. The connection that first executes a statement with this text
// is cut off.
func cutOffAfter(t testing.TB, statement string) (databaseURL string, happened <-chan struct{}) {
	t.Helper()
	u, err := url.Parse(testkit.DatabaseURL(t))
	require.NoError(t, err)
	c := &cutOff{after: statement, happened: make(chan struct{})}
	u.Host = testkit.Proxy(t, u.Host, func(client, server net.Conn) {
		var requests sync.WaitGroup
		requests.Go(func() {
			if !c.forward(server, client) {
				_ = server.Close()
			}
		})
		_, _ = io.Copy(client, server)
		_ = client.Close()
		requests.Wait()
	})
	return u.String(), c.happened
}

// forward forwards the messages of a client. It returns true if the connection was cut off.
func (c *cutOff) forward(server io.Writer, client io.Reader) bool {
	const sslRequest = 80877103
	for plain := false; !plain; { // the first messages have no type
		body, err := forwardMessage(server, client, nil)
		if err != nil {
			return false
		}
		plain = binary.BigEndian.Uint32(body) != sslRequest
	}
	awaited := map[string]bool{} // statements with the text
	bound := false
	for {
		kind := make([]byte, 1)
		if _, err := io.ReadFull(client, kind); err != nil {
			return false
		}
		body, err := forwardMessage(server, client, kind)
		if err != nil {
			return false
		}
		switch words := strings.SplitN(string(body), "\x00", 3); kind[0] {
		case 'P':
			awaited[words[0]] = strings.Contains(words[1], c.after)
		case 'B':
			bound = awaited[words[1]]
		case 'E':
			cut := false
			if bound {
				c.once.Do(func() { cut = true })
			}
			if cut {
				close(c.happened)
				return true
			}
		}
	}
}

// forwardMessage forwards one message, and returns its body.
func forwardMessage(server io.Writer, client io.Reader, kind []byte) ([]byte, error) {
	length := make([]byte, 4)
	if _, err := io.ReadFull(client, length); err != nil {
		return nil, err
	}
	body := make([]byte, binary.BigEndian.Uint32(length)-4)
	if _, err := io.ReadFull(client, body); err != nil {
		return nil, err
	}
	_, err := server.Write(append(append(kind, length...), body...))
	return body, err
}
