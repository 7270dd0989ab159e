package compose

import (
	"context"
	"fmt"
	"net"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/compose-spec/compose-go/v2/types"
)

var nodes = []string{"redis-1", "redis-2", "redis-3", "redis-4", "redis-5", "redis-6"}

func TestClusterHasSixNodesInPlaceOfRedis(t *testing.T) {
	project := loadCluster(t)
	want := slices.Sorted(slices.Values(append([]string{
		"cluster", "dashboard", "ingress", "migrate", "postgres", "proxy", "relay", "worker",
	}, nodes...)))
	if got := slices.Sorted(slices.Values(project.ServiceNames())); !slices.Equal(got, want) {
		t.Errorf("services %v, want %v", got, want)
	}
	for name, want := range map[string]int{"ingress": 2, "worker": 4, "postgres": 1} {
		if got := service(t, project, name).GetScale(); got != want {
			t.Errorf("%d of %s, want %d", got, name, want)
		}
	}
}

func TestClientsKnowAllNodes(t *testing.T) {
	project := loadCluster(t)
	want := "redis+cluster://" + strings.Join(nodes, ":6379,") + ":6379"
	for _, name := range []string{"ingress", "worker", "relay", "dashboard", "migrate"} {
		env := service(t, project, name).Environment
		if got := env["REDIS_URL"]; got == nil || *got != want {
			t.Errorf("%s: REDIS_URL is not %s", name, want)
		}
		if got := env["STAMPEDE_PARTITIONS"]; got == nil || *got != "8" {
			t.Errorf("%s: STAMPEDE_PARTITIONS is not 8", name)
		}
	}
}

// A node that comes back with another address or without its data is not the node that the others know.
func TestNodesKeepAddressesAndData(t *testing.T) {
	project := loadCluster(t)
	if pools := project.Networks["back"].Ipam.Config; len(pools) != 1 || pools[0].IPRange == "" {
		t.Errorf("pools %+v, want one whose dynamic addresses are apart", pools)
	}
	seen := map[string]bool{}
	for _, name := range nodes {
		s := service(t, project, name)
		address := s.Networks["back"].Ipv4Address
		if address == "" || seen[address] {
			t.Errorf("%s has the address %q, want one of its own", name, address)
		}
		seen[address] = true
		if len(s.Volumes) != 1 || s.Volumes[0].Source != name || s.Volumes[0].Target != "/data" {
			t.Errorf("%s has volumes %+v, want its own at /data", name, s.Volumes)
		}
		if script := strings.Join(service(t, project, "cluster").Command, " "); !strings.Contains(script,
			strings.TrimPrefix(address, "172.30.86")+":6379") {
			t.Errorf("the cluster is created without %s", address)
		}
	}
}

func TestClusterStartOrder(t *testing.T) {
	project := loadCluster(t)
	for _, name := range nodes {
		if got := service(t, project, "cluster").DependsOn[name].Condition; got != types.ServiceConditionHealthy {
			t.Errorf("the cluster is created when %s is %q", name, got)
		}
	}
	for _, name := range []string{"ingress", "worker", "relay", "dashboard"} {
		on := service(t, project, name).DependsOn
		if got := on["cluster"].Condition; len(on) != 3 || got != types.ServiceConditionCompletedSuccessfully {
			t.Errorf("%s depends on %v", name, on)
		}
	}
}

func TestScriptOfClusterIsValid(t *testing.T) {
	command := service(t, loadCluster(t), "cluster").Command
	out, err := exec.CommandContext(t.Context(), "sh", "-n", "-c", command[len(command)-1]).CombinedOutput()
	if err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// Redis itself reads the options of a node.
func TestNodesStart(t *testing.T) {
	port, bus := freePort(t), freePort(t)
	args := slices.Concat(service(t, loadCluster(t), nodes[0]).Command[1:],
		[]string{"--port", port, "--cluster-port", bus, "--dir", t.TempDir(), "--bind", "127.0.0.1"})
	ctx, stop := context.WithCancel(t.Context())
	server := exec.CommandContext(ctx, "redis-server", args...)
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stop()
		_ = server.Wait()
	})
	for until := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		out, _ := exec.CommandContext(t.Context(), "redis-cli", "-p", port, "config", "get", "cluster-*").CombinedOutput()
		if strings.Contains(string(out), "cluster-require-full-coverage\nno\n") &&
			strings.Contains(string(out), "cluster-enabled\nyes\n") {
			return
		}
		if time.Now().After(until) {
			t.Fatalf("the node does not answer with its options: %s", out)
		}
	}
}

func freePort(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	return fmt.Sprint(listener.Addr().(*net.TCPAddr).Port)
}
