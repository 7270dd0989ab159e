//go:build system

package localserver

import (
	"net"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestStartTriesAnotherPort(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, taken.Close()) })

	servers := map[string]func(*testing.T, account, *serverFolder) *server{
		"redis": func(t *testing.T, a account, f *serverFolder) *server {
			binary, found := findRedis()
			require.True(t, found)
			return &server{
				name: "Redis", binary: binary, account: a, folder: f,
				readyMark: readyMark, args: func(port int) []string { return redisArgs(port, nil) },
			}
		},
		"postgres": func(t *testing.T, a account, f *serverFolder) *server {
			programs, found := findPostgres()
			require.True(t, found)
			data := filepath.Join(f.path, "data")
			require.NoError(t, makeCluster(t.Context(), programs, data, f, a))
			return &server{
				name: "Postgres", binary: filepath.Join(programs, "postgres"), account: a, folder: f,
				readyMark: readyMark, args: func(port int) []string { return postgresArgs(data, port, nil) },
			}
		},
	}
	for name, prepare := range servers {
		t.Run(name, func(t *testing.T) {
			a, err := serverAccount()
			require.NoError(t, err)
			f, err := newFolder(name, a)
			require.NoError(t, err)
			s := prepare(t, a, f)
			picked := 0
			err = s.start(t.Context(), func() (int, error) {
				if picked++; picked == 1 {
					return taken.Addr().(*net.TCPAddr).Port, nil
				}
				return freePort()
			})
			require.NoError(t, err)
			s.stop(syscall.SIGQUIT)
			require.Equal(t, 2, picked)
		})
	}
}

func TestFreePortIsBelowClientPorts(t *testing.T) {
	t.Parallel()
	port, err := freePort()
	require.NoError(t, err)
	require.GreaterOrEqual(t, port, portMin)
	require.Less(t, port, portMax)
}

func TestOutputDetectsReadinessAcrossWrites(t *testing.T) {
	t.Parallel()
	o := newOutput(readyMark)
	write := func(text string) {
		n, err := o.Write([]byte(text))
		require.NoError(t, err)
		require.Equal(t, len(text), n)
	}
	write("* Ready to acc")
	select {
	case <-o.ready:
		t.Fatal("ready too early")
	default:
	}
	write("ept connections\n")
	<-o.ready
	write(strings.Repeat("x", 2*outputMax) + "end")
	require.Len(t, o.String(), outputMax)
	require.True(t, strings.HasSuffix(o.String(), "xend"))
}
