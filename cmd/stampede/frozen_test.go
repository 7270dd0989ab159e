//go:build system

package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation"
)

// byHand is a connection to an ingress on which a test writes and reads when it wants to.
type byHand struct {
	t       *testing.T
	conn    *net.TCPConn
	answers *bufio.Reader
}

func dialByHand(t *testing.T, url string) byHand {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://")) //nolint:noctx // it ends with the test
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return byHand{t, conn.(*net.TCPConn), bufio.NewReader(conn)}
}

// posts sends a call that changes something, as the user and an operator.
func (c byHand) posts(path, user, body string) {
	c.t.Helper()
	_, err := fmt.Fprintf(c.conn, "POST %s HTTP/1.1\r\nHost: shop\r\nX-User-ID: %s\r\nAuthorization: Bearer %s\r\n"+
		"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", path, user, adminToken, len(body), body)
	require.NoError(c.t, err)
}

func (c byHand) receives() (status int, body string) {
	c.t.Helper()
	require.NoError(c.t, c.conn.SetReadDeadline(time.Now().Add(within)))
	res, err := http.ReadResponse(c.answers, nil)
	require.NoError(c.t, err)
	text, err := io.ReadAll(res.Body)
	require.NoError(c.t, err)
	require.NoError(c.t, res.Body.Close())
	return res.StatusCode, string(text)
}

// operate changes a sale as an operator.
func operate(t *testing.T, url string, sale uuid.UUID, call, body string) {
	t.Helper()
	c := dialByHand(t, url)
	c.posts("/v1/sales/"+sale.String()+"/"+call, "", body)
	status, answer := c.receives()
	require.Equal(t, http.StatusOK, status, answer)
}

// sum returns the sum of the series of a metrics page that begin so.
func sum(t *testing.T, url, beginning string) (total float64) {
	t.Helper()
	for _, line := range scrape(t, url) {
		if strings.HasPrefix(line, beginning) {
			value, err := strconv.ParseFloat(line[strings.LastIndexByte(line, ' ')+1:], 64)
			require.NoError(t, err)
			total += value
		}
	}
	return total
}

// A frozen ingress continues with requests whose clients have gone and were answered by another one, or still wait: it
// must carry none of them out.
func TestFrozenIngressCarriesOutNothingLate(t *testing.T) {
	t.Parallel()
	for _, reader := range []string{"on", "off"} {
		t.Run("plain reader "+reader, func(t *testing.T) {
			t.Parallel()
			s := newShop(t)
			frozen, stale := s.serve("--plain-reader=" + reader)
			_, url := s.serve()
			warm, paused, soldOut, resumed := s.sale(url, 100), s.sale(url, 100), s.sale(url, 1), s.sale(url, 1)
			orders := func(sale uuid.UUID) string { return "/v1/sales/" + sale.String() + "/orders" }
			operate(t, url, resumed, "pause", "")

			// clients are two of a kind for each sale: one connects to the frozen ingress, and one has bought before.
			var early, late, leave []func()
			var waiting []*byHand
			users := map[uuid.UUID][]string{}
			clients := func(kind string, send *[]func(), leaves func(*net.TCPConn) error) {
				for _, sale := range []uuid.UUID{paused, soldOut} {
					for _, before := range []string{"new", "known"} {
						c, user := new(byHand), kind+"-"+before
						users[sale] = append(users[sale], user)
						if before == "known" {
							*c = dialByHand(t, stale)
							c.posts(orders(warm), user+sale.String(), `{"quantity":1}`)
							status, answer := c.receives()
							require.Equal(t, http.StatusAccepted, status, answer)
						}
						*send = append(*send, func() {
							if before == "new" {
								*c = dialByHand(t, stale)
							}
							c.posts(orders(sale), user, `{"quantity":1}`)
						})
						if leaves == nil {
							waiting = append(waiting, c)
						} else {
							leave = append(leave, func() { assert.NoError(t, leaves(c.conn)) })
						}
					}
				}
			}
			clients("waits", &early, nil)
			clients("closes", &early, (*net.TCPConn).Close)
			clients("half-closes", &early, (*net.TCPConn).CloseWrite)
			clients("resets", &early, func(c *net.TCPConn) error { return errors.Join(c.SetLinger(0), c.Close()) })
			clients("comes-late-and-closes", &late, (*net.TCPConn).Close)
			warmed := sum(t, stale, "stampede_purchases_total")

			frozen.Freeze()
			testkit.Eventually(t, within, "the ingress is frozen", func() bool { return testkit.Stopped(t, frozen.Pid()) })
			operator, patientOperator := dialByHand(t, stale), dialByHand(t, stale)
			operator.posts("/v1/sales/"+resumed.String()+"/resume", "", "")
			patientOperator.posts("/v1/sales/"+warm.String()+"/restock", "", `{"units":7}`)
			for _, send := range early {
				send()
			}
			const most = reservation.DefaultWaitMax
			<-time.After(most + most/10)

			// Meanwhile everybody gets an answer from the other ingress.
			operate(t, url, paused, "pause", "")
			s.buy(url, soldOut, "another")
			for _, sale := range []uuid.UUID{paused, soldOut} {
				for _, user := range users[sale] {
					require.Equal(t, http.StatusConflict, ask(t, http.MethodPost, url+orders(sale), user, "").HTTP, user)
				}
			}
			operate(t, url, paused, "resume", "")
			operate(t, url, soldOut, "restock", `{"units":100}`)
			operate(t, url, resumed, "resume", "")
			operate(t, url, resumed, "pause", "")
			for _, send := range late {
				send()
			}
			for _, leave := range leave {
				leave()
			}
			require.NoError(t, operator.conn.Close())

			frozen.Thaw()
			for _, c := range append(waiting, &patientOperator) {
				status, answer := c.receives()
				assert.Equal(t, http.StatusServiceUnavailable, status, answer)
				assert.NotContains(t, answer, "outcome-unknown")
			}
			all := float64(len(early) + len(late))
			testkit.Eventually(t, within, "all purchases are answered", func() bool {
				return sum(t, stale, "stampede_purchases_total") == warmed+all
			})
			assert.Equal(t, warmed, sum(t, stale, `stampede_purchases_total{verdict="reserved"}`))
			// A busy machine may see its connections to Redis end meanwhile. Nothing is reserved then, too.
			assert.Equal(t, all, sum(t, stale, `stampede_purchases_total{verdict="overloaded"}`)+
				sum(t, stale, `stampede_purchases_total{verdict="unavailable"}`), scrape(t, stale))
			assert.GreaterOrEqual(t, sum(t, stale, "stampede_purchase_wait_seconds_sum"), most.Seconds()*float64(len(early)))
			for sale, state := range map[uuid.UUID]string{paused: "open", soldOut: "open", resumed: "paused"} {
				_, output := s.run("sale", "show", sale.String(), "--output=json")
				assert.Contains(t, output, `"state":"`+state+`"`)
			}
			_, output := s.run("sale", "show", warm.String(), "--output=json")
			assert.Contains(t, output, `"stock":100`)
		})
	}
}
