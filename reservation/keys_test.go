package reservation_test

import (
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/reservation"
)

// Each kind of key is in the list of keys, with its parts: a partition, a sale, a user, a target, a token.
func TestEachKeyIsInTheListOfKeys(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../docs/data.md")
	require.NoError(t, err)
	page := strings.ReplaceAll(string(text), "`…:", "`stampede:{p}:")
	page = regexp.MustCompile(`<[a-z]+>`).ReplaceAllString(page, "<part>")
	sale := uuid.Must(uuid.NewV7())
	keys := reflect.ValueOf(reservation.Keys{Prefix: "stampede", Partitions: 1})
	seen := 0
	for i := range keys.NumMethod() {
		method := keys.Method(i)
		if method.Type().NumOut() != 1 || method.Type().Out(0).Kind() != reflect.String {
			continue
		}
		var args []reflect.Value
		for n := range method.Type().NumIn() {
			switch in := method.Type().In(n); in {
			case reflect.TypeFor[uuid.UUID]():
				args = append(args, reflect.ValueOf(sale))
			case reflect.TypeFor[string]():
				args = append(args, reflect.ValueOf("<part>"))
			default:
				args = append(args, reflect.Zero(in))
			}
		}
		key := strings.NewReplacer("{0}", "{p}", sale.String(), "<part>").Replace(method.Call(args)[0].String())
		require.Regexp(t, "(?m)^\\|.*`"+regexp.QuoteMeta(key)+"(`|:…`)", page)
		seen++
	}
	require.Greater(t, seen, 10)
}
