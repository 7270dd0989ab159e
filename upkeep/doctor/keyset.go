package doctor

import (
	"context"
	"fmt"
	"strings"

	"stampede/internal/keyset"
)

// ignoredShown bounds the keys that a finding names.
const ignoredShown = 10

// KeySet fetches the key set that verifies the tokens of buyers, as an ingress does, and finds keys that cannot be
// used.
func KeySet(ctx context.Context, url string) []Finding {
	keys, err := keyset.Fetch(ctx, url)
	switch {
	case keys == nil:
		return []Finding{{
			Severity: Away, Server: "key set", What: err.Error(),
			Why:  "an ingress that starts now can identify no buyer, and refuses all of them until it has a key",
			Mend: "repair the way to the provider, or correct STAMPEDE_JWKS_URL",
		}}
	case err != nil:
		return []Finding{{
			Severity: Unsafe, Server: "key set", What: err.Error() + ": " + shown(keys.Ignored),
			Why:  "no token of a buyer can be verified",
			Mend: "have the provider publish a public RSA key of 2048 bits or more, of P-256, P-384, P-521 or Ed25519, for sig",
		}}
	case len(keys.Ignored) == 0:
		return nil
	}
	return []Finding{{
		Severity: Warning, Server: "key set",
		What: fmt.Sprintf("%d of %d keys cannot be used: %s", len(keys.Ignored), len(keys.Ignored)+keys.Len(),
			shown(keys.Ignored)),
		Why:  "tokens that they sign are refused",
		Mend: "nothing if the provider signs no tokens of buyers with them; else have it publish them correctly",
	}}
}

func shown(ignored []string) string {
	more := ""
	if n := len(ignored) - ignoredShown; n > 0 {
		more = fmt.Sprintf("; and %d more", n)
	}
	return strings.Join(ignored[:min(len(ignored), ignoredShown)], "; ") + more
}
