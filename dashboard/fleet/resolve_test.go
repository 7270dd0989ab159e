//go:build system

package fleet

import (
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Processes come and go behind one name: one that is gone is shown as gone, and not as one that does nothing.
func TestAddressesOfNameAreProcesses(t *testing.T) {
	t.Parallel()
	first := newPageAt(t, "127.0.0.1:0", ingressPage(1, 100, 0, 0, 0))
	_, port, err := net.SplitHostPort(first.Listener.Addr().String())
	require.NoError(t, err)
	second := newPageAt(t, "127.0.0.2:"+port, ingressPage(1, 100, 0, 0, 0))
	names.set("ingress.test.", "127.0.0.2", "127.0.0.1")
	f, _ := newFleet(t, "dns+http://ingress.test:"+port)
	// up are the addresses that answer and those that do not, in their order.
	up := func(s *Snapshot) (up, gone []string) {
		for _, p := range s.Processes {
			host := strings.TrimSuffix(strings.TrimPrefix(p.Target, "http://"), ":"+port+"/metrics")
			if p.Up {
				up = append(up, host)
			} else {
				gone = append(gone, host)
			}
		}
		return up, gone
	}
	are := func(wantUp, wantGone []string) func(*Snapshot) bool {
		return func(s *Snapshot) bool {
			nowUp, gone := up(s)
			return slices.Equal(nowUp, wantUp) && slices.Equal(gone, wantGone)
		}
	}
	f.play(t, "both addresses are processes", are([]string{"127.0.0.1", "127.0.0.2"}, nil))
	sold := 100
	f.play(t, "their purchases are added", func(s *Snapshot) bool {
		sold += 50
		first.set(ingressPage(1, sold, 0, 0, 0))
		second.set(ingressPage(1, sold, 0, 0, 0))
		p := s.Processes
		return p[0].PerSecond > 0 && p[1].PerSecond > 0 && s.Rates.Accepted == p[0].PerSecond+p[1].PerSecond
	})

	second.CloseClientConnections()
	second.Close()
	s := f.play(t, "one is gone", are([]string{"127.0.0.1"}, []string{"127.0.0.2"}))
	require.NotEmpty(t, s.Processes[1].Error)
	require.False(t, s.Processes[1].LastSeen.IsZero())
	require.Equal(t, []string{targetGone.name}, troubleNames(s))
	require.Contains(t, s.Troubles[0].Text, "127.0.0.2")

	newPageAt(t, "127.0.0.3:"+port, ingressPage(1, 7, 0, 0, 0))
	names.set("ingress.test.", "127.0.0.3", "127.0.0.1")
	f.play(t, "a new one is there, and the lost one is not forgotten yet",
		are([]string{"127.0.0.1", "127.0.0.3"}, []string{"127.0.0.2"}))
	f.mu.Lock()
	for _, p := range f.processes {
		p.listedAt = p.listedAt.Add(-forgetAfter)
	}
	f.mu.Unlock()
	s = f.play(t, "what the name has lost is forgotten", are([]string{"127.0.0.1", "127.0.0.3"}, nil))
	require.Empty(t, troubleNames(s))

	// A name server that fails says nothing about the processes.
	names.set("ingress.test.")
	s = f.play(t, "the name has no address", func(s *Snapshot) bool { return len(s.Processes) == 3 })
	require.True(t, s.Processes[0].Up)
	require.True(t, s.Processes[1].Up)
	require.NotEmpty(t, s.Processes[2].Error)
	require.WithinDuration(t, time.Now(), s.Processes[2].Since, time.Minute)
}
