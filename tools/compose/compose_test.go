// Package compose checks compose.yaml, Dockerfile and deploy/haproxy.cfg against the documentation. It is a separate
// module, so that the main module does not depend on the parser.
package compose

import (
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"
)

const root = "../.."

// secrets are variables without a default: a stack must not start with publicly known values.
var secrets = []string{"POSTGRES_PASSWORD", "STAMPEDE_ADMIN_TOKEN", "STAMPEDE_JWT_SECRET"}

// load reads the files like `docker compose`, with only the given environment.
func load(t *testing.T, files []string, env ...string) (*types.Project, error) {
	t.Helper()
	paths := make([]string, len(files))
	for i, file := range files {
		paths[i] = filepath.Join(root, file)
	}
	options, err := cli.NewProjectOptions(paths, cli.WithEnv(env))
	if err != nil {
		t.Fatal(err)
	}
	return options.LoadProject(t.Context())
}

var single = []string{"compose.yaml"}

func loadWithSecrets(t *testing.T) *types.Project {
	t.Helper()
	return loadFilesWithSecrets(t, single)
}

func loadCluster(t *testing.T) *types.Project {
	t.Helper()
	return loadFilesWithSecrets(t, append(single[:1:1], "compose.cluster.yaml"))
}

func loadFilesWithSecrets(t *testing.T, files []string) *types.Project {
	t.Helper()
	var env []string
	for _, name := range secrets {
		env = append(env, name+"=x")
	}
	project, err := load(t, files, env...)
	if err != nil {
		t.Fatal(err)
	}
	return project
}

// both runs a test on compose.yaml, and on it with compose.cluster.yaml.
func both(t *testing.T, test func(t *testing.T, project *types.Project)) {
	t.Helper()
	t.Run("single", func(t *testing.T) { test(t, loadWithSecrets(t)) })
	t.Run("cluster", func(t *testing.T) { test(t, loadCluster(t)) })
}

// redisOptions are the options of a service that runs redis-server.
func redisOptions(t *testing.T, project *types.Project, name string) map[string]string {
	t.Helper()
	command := service(t, project, name).Command
	if len(command) == 0 || command[0] != "redis-server" || len(command)%2 == 0 {
		t.Fatalf("command %q, want redis-server and pairs of option and value", command)
	}
	options := map[string]string{}
	for pair := range slices.Chunk(command[1:], 2) {
		options[pair[0]] = pair[1]
	}
	return options
}

// redisServers are the services that run Redis.
func redisServers(project *types.Project) (names []string) {
	for name := range project.Services {
		if name == "redis" || strings.HasPrefix(name, "redis-") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// oneShots are services that end.
var oneShots = []string{"migrate", "cluster"}

// service returns a service that the project must have.
func service(t *testing.T, project *types.Project, name string) *types.ServiceConfig {
	t.Helper()
	s, ok := project.Services[name]
	if !ok {
		t.Fatalf("no service %s, only %v", name, project.ServiceNames())
	}
	return &s
}

func TestServices(t *testing.T) {
	project := loadWithSecrets(t)
	const healthy, completed = types.ServiceConditionHealthy, types.ServiceConditionCompletedSuccessfully
	ours := map[string]string{"redis": healthy, "postgres": healthy, "migrate": completed}
	// By default the image's health check requests the address of an ingress.
	probed := map[string]string{
		"STAMPEDE_METRICS_ADDR": ":9090", "STAMPEDE_HEALTHCHECK_URL": "http://127.0.0.1:9090/readyz",
	}
	tokens := map[string]string{"STAMPEDE_AUTH": "jwt"}
	want := map[string]struct {
		image, command, health string // health is in the check of a service that does not end
		replicas               int
		networks               []string
		after, env             map[string]string
	}{
		"redis":     {"redis:8-alpine", "redis-server", "redis-cli ping", 1, []string{"back"}, nil, nil},
		"postgres":  {"postgres:18", "postgres -c max_connections=200", "pg_isready", 1, []string{"back"}, nil, nil},
		"migrate":   {"stampede:dev", "migrate up", "", 1, []string{"back"}, map[string]string{"postgres": healthy}, nil},
		"ingress":   {"stampede:dev", "serve", "/stampede healthcheck", 2, []string{"back", "front"}, ours, tokens},
		"worker":    {"stampede:dev", "work", "/stampede healthcheck", 3, []string{"back"}, ours, probed},
		"relay":     {"stampede:dev", "relay run", "/stampede healthcheck", 1, []string{"back", "front"}, ours, probed},
		"dashboard": {"stampede:dev", "dashboard", "/stampede healthcheck", 1, []string{"back", "desk"}, ours, nil},
		"proxy":     {"haproxy:3.2-alpine", "", "/readyz", 1, []string{"front"}, map[string]string{"ingress": healthy}, nil},
	}
	for name, want := range want {
		s := service(t, project, name)
		if s.Image != want.image || (s.Build != nil) != (want.image == "stampede:dev") {
			t.Errorf("%s runs %s, built here: %t, want %s", name, s.Image, s.Build != nil, want.image)
		}
		command := strings.Join(s.Command, " ")
		if name == "redis" { // its options have tests of their own
			command, _, _ = strings.Cut(command, " ")
		}
		if command != want.command || s.GetScale() != want.replicas {
			t.Errorf("%d of %s run %q, want %d of %q", s.GetScale(), name, command, want.replicas, want.command)
		}
		if got := slices.Sorted(slices.Values(s.NetworksByPriority())); !slices.Equal(got, want.networks) {
			t.Errorf("%s is on %v, want %v", name, got, want.networks)
		}
		after := map[string]string{}
		for on, dependency := range s.DependsOn {
			after[on] = dependency.Condition
		}
		if !maps.Equal(after, want.after) {
			t.Errorf("%s starts after %v, want %v", name, after, want.after)
		}
		for variable, value := range want.env {
			if got := s.Environment[variable]; got == nil || *got != value {
				t.Errorf("%s: %s is not %q", name, variable, value)
			}
		}
		check := s.HealthCheck
		if check == nil || check.Disable != (want.health == "") ||
			!strings.Contains(strings.Join(check.Test, " "), want.health) {
			t.Errorf("the health check of %s is %+v, want %s", name, check, want.health)
			continue
		}
		if !check.Disable &&
			(check.Interval == nil || check.Timeout == nil || check.Retries == nil || check.StartPeriod == nil) {
			t.Errorf("the health check of %s does not set interval, timeout, retries and start period: %+v", name, check)
		}
	}
	if len(project.Services) != len(want) {
		t.Errorf("services %v, want those of the table", project.ServiceNames())
	}
}

func TestSecretsHaveNoDefault(t *testing.T) {
	for _, missing := range secrets {
		t.Run(missing, func(t *testing.T) {
			var env []string
			for _, name := range secrets {
				if name != missing {
					env = append(env, name+"=x")
				}
			}
			if _, err := load(t, single, env...); err == nil || !strings.Contains(err.Error(), missing) {
				t.Errorf("without it loading returns %v, want an error that names it", err)
			}
		})
	}
}

func TestRedisIsDurableAndNeverEvicts(t *testing.T) {
	both(t, func(t *testing.T, project *types.Project) {
		for _, name := range redisServers(project) {
			options := redisOptions(t, project, name)
			for option, want := range map[string]string{
				"--appendonly": "yes", "--appendfsync": "always", "--maxmemory-policy": "noeviction", "--maxmemory": "512mb",
			} {
				if got := options[option]; got != want {
					t.Errorf("%s: %s %q, want %q", name, option, got, want)
				}
			}
		}
	})
}

// Data survives its container only if the volume is where the image keeps the data. Since 18 the image of
// Postgres refuses to start with a volume at …/data.
func TestVolumes(t *testing.T) {
	project := loadWithSecrets(t)
	for name, target := range map[string]string{"redis": "/data", "postgres": "/var/lib/postgresql"} {
		volumes := service(t, project, name).Volumes
		if len(volumes) != 1 || volumes[0].Type != types.VolumeTypeVolume || volumes[0].Target != target {
			t.Errorf("%s has volumes %+v, want a named one at %s", name, volumes, target)
			continue
		}
		if _, named := project.Volumes[volumes[0].Source]; !named {
			t.Errorf("volume %q of %s is not declared", volumes[0].Source, name)
		}
	}
}

func TestServicesAreHardened(t *testing.T) {
	both(t, func(t *testing.T, project *types.Project) {
		for name, s := range project.Services {
			if !s.ReadOnly {
				t.Errorf("%s: its root file system is writable", name)
			}
			if !slices.Equal(s.CapDrop, []string{"ALL"}) || len(s.CapAdd) > 0 {
				t.Errorf("%s: it drops capabilities %v and adds %v, want ALL dropped and none added", name, s.CapDrop, s.CapAdd)
			}
			if !slices.Contains(s.SecurityOpt, "no-new-privileges:true") {
				t.Errorf("%s: its processes may gain privileges: %v", name, s.SecurityOpt)
			}
			if s.Privileged {
				t.Errorf("%s: it is privileged", name)
			}
			if s.Deploy == nil || s.Deploy.Resources.Limits == nil || s.Deploy.Resources.Limits.MemoryBytes <= 0 {
				t.Errorf("%s: it has no memory limit", name)
			}
			want := types.RestartPolicyUnlessStopped
			if slices.Contains(oneShots, name) {
				want = types.RestartPolicyNo
			}
			if s.Restart != want {
				t.Errorf("%s: its restart policy is %q, want %q", name, s.Restart, want)
			}
			if s.StopGracePeriod == nil {
				t.Errorf("%s: it has no stop grace period: the default of 10 s is shorter than a drain", name)
			}
		}
	})
}

// The entrypoints of both images start as root and change the user, which needs capabilities.
func TestServersDoNotRunAsRoot(t *testing.T) {
	both(t, func(t *testing.T, project *types.Project) {
		users := map[string]string{"postgres": "postgres"}
		for _, name := range redisServers(project) {
			users[name] = "redis"
		}
		for name, want := range users {
			if got := service(t, project, name).User; got != want {
				t.Errorf("%s runs as %q, want %q", name, got, want)
			}
		}
	})
}

// The root file system is read-only, so Postgres needs a tmpfs for its socket.
func TestPostgresHasTmpfsForSocket(t *testing.T) {
	if got := service(t, loadWithSecrets(t), "postgres").Tmpfs; !slices.Contains(got, "/run/postgresql") {
		t.Errorf("tmpfs at %v, want one at /run/postgresql", got)
	}
}

func TestRedisMemoryLimitAllowsAOFRewrite(t *testing.T) {
	const maxMemory = 512 << 20
	both(t, func(t *testing.T, project *types.Project) {
		for _, name := range redisServers(project) {
			if got := service(t, project, name).Deploy.Resources.Limits.MemoryBytes; got < 2*maxMemory {
				t.Errorf("%s: limit of %d bytes, want at least twice --maxmemory", name, got)
			}
		}
	})
}

func TestOnlyProxyAndDashboardPublishPorts(t *testing.T) {
	project := loadWithSecrets(t)
	for name, s := range project.Services {
		if want := map[string]uint32{"proxy": 8080, "dashboard": 8090}[name]; want > 0 {
			if len(s.Ports) != 1 || s.Ports[0].Target != want || s.Ports[0].HostIP != "127.0.0.1" {
				t.Errorf("%s publishes %+v, want %d on the loopback interface", name, s.Ports, want)
			}
			continue
		}
		if len(s.Ports) > 0 {
			t.Errorf("%s publishes %+v", name, s.Ports)
		}
	}
	if !project.Networks["back"].Internal {
		t.Error("the network of Redis and Postgres is not internal")
	}
}

var ofService = regexp.MustCompile(`docker compose (exec|logs|restart) (\S+)(?: (\S+))?|--scale (\S+)=`)

// The runbook's shell for compose names services that exist, and runs commands with the settings that they need.
func TestShellOfRunbook(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "docs/runbook.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, block, _ := strings.Cut(string(text), "# Compose")
	block, _, _ = strings.Cut(block, "```")
	project, ran := loadWithSecrets(t), map[string]string{}
	for _, found := range ofService.FindAllStringSubmatch(block, -1) {
		s := service(t, project, found[2]+found[4])
		if found[1] == "exec" {
			ran[s.Name] = strings.Trim(found[3], "'")
		}
	}
	// What runs the program is its image, which has no shell: tools/compose/proxy_test.go.
	if want := map[string]string{"dashboard": "/stampede", "redis": "redis-cli"}; !maps.Equal(ran, want) {
		t.Errorf("it runs %v, want %v", ran, want)
	}
	for _, variable := range []string{"REDIS_URL", "DATABASE_URL", "STAMPEDE_PARTITIONS", "STAMPEDE_SCRAPE"} {
		if service(t, project, "dashboard").Environment[variable] == nil {
			t.Errorf("its commands run without %s", variable)
		}
	}
}

func TestConfigFilesExist(t *testing.T) {
	project := loadWithSecrets(t)
	for name, s := range project.Services {
		for _, use := range s.Configs {
			if _, declared := project.Configs[use.Source]; !declared {
				t.Errorf("%s uses the config %s, which is not declared", name, use.Source)
			}
		}
	}
	if len(project.Configs) == 0 {
		t.Error("no configs, want that of the proxy")
	}
	for name, config := range project.Configs {
		if info, err := os.Stat(config.File); err != nil || !info.Mode().IsRegular() {
			t.Errorf("config %s: %s is not a file: %v", name, config.File, err)
		}
	}
}

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
