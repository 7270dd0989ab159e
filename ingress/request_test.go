package ingress

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestPreferredWait(t *testing.T) {
	t.Parallel()
	const none = -1
	for _, c := range []struct {
		headers []string
		seconds int
	}{
		{nil, none},
		{[]string{""}, none},
		{[]string{"wait=5"}, 5},
		{[]string{"wait=0"}, 0},
		{[]string{"wait=30"}, 30},
		{[]string{"wait=31"}, 30},
		{[]string{"wait=999"}, 30},
		{[]string{"wait=99999999999999999999999999"}, 30},
		{[]string{"wait=007"}, 7},
		{[]string{"WAIT=2"}, 2},
		{[]string{" wait = 2 "}, 2},
		{[]string{"\twait\t=\t2"}, 2},
		{[]string{`wait="12"`}, 12},
		{[]string{"respond-async, wait=2"}, 2},
		{[]string{"respond-async,wait=2,return=minimal"}, 2},
		{[]string{"respond-async", "wait=2"}, 2},
		{[]string{"wait=2; foo=bar, wait=9"}, 2},
		{[]string{"wait=2", "wait=9"}, 2},
		{[]string{`return="minimal, wait=9", wait=2`}, 2},
		{[]string{`x="\", wait=9", wait=2`}, 2},
		{[]string{`x="a;b=c"; wait=9, wait=2`}, 2},
		{[]string{"waiting=5"}, none},
		{[]string{"wait"}, none},
		{[]string{"wait="}, none},
		{[]string{`wait=""`}, none},
		{[]string{`wait="`}, none},
		{[]string{"wait=abc"}, none},
		{[]string{"wait=-1"}, none},
		{[]string{"wait=+1"}, none},
		{[]string{"wait=1.5"}, none},
		{[]string{"wait=1e1"}, none},
		{[]string{"wait=2 5"}, none},
		{[]string{"wait=abc, wait=5"}, none}, // only the first one counts
		{[]string{"return=minimal; wait=5"}, none},
		{[]string{`x="wait=5`}, none},
		{[]string{",,;=,"}, none},
	} {
		wait, ok := preferredWait(c.headers)
		if c.seconds == none {
			require.False(t, ok, "%q", c.headers)
			continue
		}
		require.True(t, ok, "%q", c.headers)
		require.Equal(t, time.Duration(c.seconds)*time.Second, wait, "%q", c.headers)
	}
}
