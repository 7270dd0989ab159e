package main

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/reservation/order"
)

// An error about invalid input names what was typed: each flag of the API's members, and none of these.
func TestErrorsNameFlagsOfMembers(t *testing.T) {
	t.Parallel()
	parser := newParser(&cli{})
	for command, members := range map[string]map[string]string{
		"sale create --name=x": {
			"stock": "--stock", "items": "--item", "items[2].unit_price": "--item[2].unit_price", "name": "--name",
			"per_order_limit": "--per-order-limit", "opens_at": "--opens-at", "closes_at": "--closes-at",
			"payment_window_seconds": "--payment-window", "payment_grace_seconds": "--payment-grace",
			"payments_per_second": "--payments-per-second", "unit_price": "--unit-price", "currency": "--currency",
			"shards": "--shards", "waitlist": "--waitlist",
		},
		"draw create 01edb000-0000-7000-8000-000000000003 --entries=01edb000-0000-7000-8000-000000000002": {
			"entries_sale_id": "--entries", "freeze_seconds": "--freeze", "parties": "--party",
		},
		"sale restock 01edb000-0000-7000-8000-000000000003 5": {"items": "--item", "units": "units"},
	} {
		parsed, err := parser.Parse(strings.Fields(command))
		require.NoError(t, err, command)
		for member, flag := range members {
			invalid := &order.InvalidError{Field: member, Reason: "must be later than " + member}
			named := withFlags(parsed.Selected(), invalid)
			require.True(t, strings.HasPrefix(named.Error(), flag+" must be later than "), named)
			require.ErrorIs(t, named, invalid)
		}
		for _, flag := range parsed.Selected().Flags {
			if member := strings.ReplaceAll(flag.Name, "-", "_"); flag.Name != "help" {
				named := withFlags(parsed.Selected(), &order.InvalidError{Field: member, Reason: "must be given"})
				require.Equal(t, "--"+flag.Name+" must be given", named.Error())
			}
		}
	}
	other := errors.New("payment_window_seconds must stay")
	parsed, err := parser.Parse([]string{"sale", "create", "--name=x"})
	require.NoError(t, err)
	require.Equal(t, other, withFlags(parsed.Selected(), other))
}
