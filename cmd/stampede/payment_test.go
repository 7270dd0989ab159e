//go:build system

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/reservation/order"
)

func TestPaymentCommands(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	sale, orders := s.recorded("ann", "bob")
	ann := orders["ann"].String()
	archived, others := s.recorded("cid")
	_, err := s.pool.Exec(t.Context(), "UPDATE sales SET archived_at = now() WHERE id = $1", archived)
	require.NoError(t, err)
	_, err = s.pool.Exec(t.Context(), "DELETE FROM orders WHERE sale_id = $1", archived)
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "provider.jsonl")
	lines := []string{
		`{"order_id":"` + ann + `","reference":"pi_1","amount":4900,"currency":"EUR","livemode":true}`,
		`{"order_id":"` + ann + `","reference":"pi_2","amount":4900,"currency":"EUR"}`,
		``,
		`{"order_id":"` + ann + `"}`,
		`{"order_id":"cart 7","reference":"pi_3"}`,
		`{"order_id":"` + order.NewOrderID(sale).String() + `","reference":"pi_4"}`,
		`{"order_id":"` + ann + `","reference":"pi_1"`,
		`{"order_id":"` + orders["bob"].String() + `","reference":"pi_1"}`,
		`{"order_id":"` + others["cid"].String() + `","reference":"pi_5"}`,
	}
	require.NoError(t, os.WriteFile(file, []byte(strings.Join(lines, "\n")), 0o600))
	output := s.ends(exitFailed, "payment", "import", file)
	assert.Contains(t, output, "line 4: reference must be 1 to 255 characters\n")
	assert.Contains(t, output, "line 7: the report must be one JSON object\n")
	assert.Contains(t, output, "1 settled, 2 due for refund, 1 waiting, 1 reported before, 1 of archived sales, 2 bad lines\n")
	output = s.ends(exitFailed, "payment", "import", "--output=json", file)
	assert.Contains(t, output, `{"settled":0,"refund_due":0,"waiting":0,"repeated":5,"archived":1,"bad":2}`)
	output = s.ends(exitOK, "payment", "import", "-")
	assert.Equal(t, "0 settled, 0 due for refund, 0 waiting, 0 reported before, 0 of archived sales, 0 bad lines\n", output, "the input is empty")

	references := func(flags ...string) (found []string) {
		for _, p := range objects(t, s.ends(exitOK, append([]string{"payment", "list", "--output=json"}, flags...)...)) {
			found = append(found, fmt.Sprint(p["reference"], " ", p["state"], " ", p["reason"]))
		}
		return found
	}
	due := []string{"pi_2 refund_due already-paid", "pi_3 refund_due order-not-found"}
	assert.Equal(t, due, references("--state=refund_due"))
	assert.Equal(t, []string{"pi_1 settled <nil>", due[0]}, references("--sale="+sale.String(), "--order="+ann))
	assert.Len(t, references(), 4)
	output = s.ends(exitOK, "payment", "list", "--limit=3")
	assert.Equal(t, 5, strings.Count(output, "\n"), output)
	assert.Contains(t, output, "there are more: raise --limit")
	assert.Regexp(t, `pi_2 +refund_due +already-paid +4900 EUR +`+ann, output)
	assert.Regexp(t, `pi_3 +refund_due +order-not-found +- +- +2`, output)

	for range 2 {
		output = s.ends(exitOK, "payment", "refunded", "pi_2", "re_1", "--operator=eve")
		assert.Equal(t, "payment pi_2 is refunded with re_1\n", output)
	}
	output = s.ends(exitOK, "payment", "show", "pi_2")
	for _, want := range []string{
		`state +refunded`, `reason +already-paid`, `amount +4900 EUR`, `refund +re_1`, `operator +eve`,
	} {
		assert.Regexp(t, want, output)
	}
	output = s.ends(exitOK, "payment", "show", "pi_3")
	assert.Regexp(t, `cannot be read +order_id "cart 7"`, output)
	output = s.ends(exitOK, "order", "cancel", ann, "--reason=r")
	assert.Contains(t, output, "refund the payment pi_1: `stampede payment list --order "+ann+"` shows it")
	assert.Equal(t, []string{due[1], "pi_1 refund_due order-cancelled"}, references("--state=refund_due"))

	for want, args := range map[string][]string{
		"payment not found":                    {"refunded", "pi_0", "re_1"},
		"no refund of the payment is due":      {"refunded", "pi_4", "re_1"},
		`it was refunded with reference "re_1`: {"refunded", "pi_2", "re_2"},
	} {
		assert.Contains(t, s.ends(exitFailed, append([]string{"payment"}, args...)...), want)
	}
	assert.Contains(t, s.ends(exitFailed, "payment", "show", "pi_0"), "payment not found")
	for want, args := range map[string][]string{
		"refund_reference must not": {"refunded", "pi_3", " "},
		"--limit is 0":              {"list", "--limit=0"},
		"must be one of":            {"list", "--state=paid"},
		`"x" is not an order id`:    {"list", "--order=x"},
		"no such file or directory": {"import", filepath.Join(t.TempDir(), uuid.NewString())},
	} {
		assert.Contains(t, s.ends(exitUsage, append([]string{"payment"}, args...)...), want)
	}
}
