package lock

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

// Redis Cluster hashes what is between the first { and the } after it, if that is not empty, and
// else the whole key.
func TestAReceiptLiesInTheSlotOfItsLock(t *testing.T) {
	for key, want := range map[string]string{
		"stampede:{0}:lock:ann": "stampede:{0}:lock:ann:released:1",
		"ann":                   "{ann}:released:1",
	} {
		assert.Equal(t, want, receiptKey(key, "1"))
	}
}

func TestAnAnswerThatTheHeaderDoesNotListIsAnError(t *testing.T) {
	assert.NoError(t, check([]string{"held", "busy"}, 2, answerHeld, answerBusy))
	assert.ErrorContains(t, check([]string{"held"}, 2, answerHeld), "1 answers for 2 keys")
	assert.ErrorContains(t, check([]string{"kept"}, 1, answerHeld), `unknown answer "kept"`)
}
