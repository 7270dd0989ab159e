// Package compose checks compose.yaml, Dockerfile and deploy/haproxy.cfg against the documentation. It is a separate
// module, so that the main module does not depend on the parser.
package compose

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"
)

const root = "../.."

// secrets are variables without a default: a stack must not start with publicly known values.
var secrets = []string{"POSTGRES_PASSWORD", "STAMPEDE_ADMIN_TOKEN", "STAMPEDE_JWT_SECRET"}

// load reads compose.yaml like `docker compose`, with only the given environment.
func load(t *testing.T, env ...string) (*types.Project, error) {
	t.Helper()
	return loadFiles(t, []string{"compose.yaml"}, env...)
}

func loadFiles(t *testing.T, files []string, env ...string) (*types.Project, error) {
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

func loadWithSecrets(t *testing.T) *types.Project {
	t.Helper()
	return loadFilesWithSecrets(t, "compose.yaml")
}

func loadCluster(t *testing.T) *types.Project {
	t.Helper()
	return loadFilesWithSecrets(t, "compose.yaml", "compose.cluster.yaml")
}

func loadFilesWithSecrets(t *testing.T, files ...string) *types.Project {
	t.Helper()
	env := make([]string, len(secrets))
	for i, name := range secrets {
		env[i] = name + "=x"
	}
	project, err := loadFiles(t, files, env...)
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
	want := []string{"dashboard", "ingress", "migrate", "postgres", "proxy", "redis", "relay", "worker"}
	if got := slices.Sorted(slices.Values(loadWithSecrets(t).ServiceNames())); !slices.Equal(got, want) {
		t.Errorf("services %v, want %v", got, want)
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
			if _, err := load(t, env...); err == nil || !strings.Contains(err.Error(), missing) {
				t.Errorf("without it loading returns %v, want an error that names it", err)
			}
		})
	}
}

func TestImages(t *testing.T) {
	project := loadWithSecrets(t)
	for name, image := range map[string]string{"redis": "redis:8-alpine", "postgres": "postgres:18"} {
		if got := service(t, project, name).Image; got != image {
			t.Errorf("%s runs %s, want %s", name, got, image)
		}
	}
	for _, name := range []string{"ingress", "worker", "relay", "dashboard", "migrate"} {
		s := service(t, project, name)
		if s.Build == nil || s.Image != "stampede:dev" {
			t.Errorf("%s runs %s, want stampede:dev with a build", name, s.Image)
		}
	}
}

func TestCommands(t *testing.T) {
	project := loadWithSecrets(t)
	for name, want := range map[string][]string{
		"ingress": {"serve"}, "worker": {"work"}, "relay": {"relay", "run"}, "migrate": {"migrate", "up"},
		"dashboard": {"dashboard"},
		"postgres":  {"postgres", "-c", "max_connections=200"},
	} {
		if got := service(t, project, name).Command; !slices.Equal(got, want) {
			t.Errorf("%s runs %v, want %v", name, got, want)
		}
	}
}

func TestReplicas(t *testing.T) {
	project := loadWithSecrets(t)
	for name, want := range map[string]int{
		"ingress": 2, "worker": 3, "relay": 1, "dashboard": 1, "migrate": 1, "proxy": 1, "redis": 1,
		"postgres": 1,
	} {
		if got := service(t, project, name).GetScale(); got != want {
			t.Errorf("%d of %s, want %d", got, name, want)
		}
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

func TestLongRunningServicesHaveHealthChecks(t *testing.T) {
	project := loadWithSecrets(t)
	for name, want := range map[string]string{
		"redis": "redis-cli ping", "postgres": "pg_isready", "ingress": "/stampede healthcheck",
		"worker": "/stampede healthcheck", "relay": "/stampede healthcheck", "dashboard": "/stampede healthcheck",
		"proxy": "/readyz",
	} {
		check := service(t, project, name).HealthCheck
		if check == nil || check.Disable || !strings.Contains(strings.Join(check.Test, " "), want) {
			t.Errorf("the health check of %s is %+v, want %s", name, check, want)
			continue
		}
		if check.Interval == nil || check.Timeout == nil || check.Retries == nil || check.StartPeriod == nil {
			t.Errorf("the health check of %s does not set interval, timeout, retries and start period: %+v", name, check)
		}
	}
	if check := service(t, project, "migrate").HealthCheck; check == nil || !check.Disable {
		t.Errorf("the health check of migrate is %+v, want none", check)
	}
}

// By default the image's health check requests the address of an ingress.
func TestHealthChecksUseMetricsAddress(t *testing.T) {
	project := loadWithSecrets(t)
	for _, of := range []string{"worker", "relay"} {
		env := service(t, project, of).Environment
		for name, want := range map[string]string{
			"STAMPEDE_METRICS_ADDR": ":9090", "STAMPEDE_HEALTHCHECK_URL": "http://127.0.0.1:9090/readyz",
		} {
			if got := env[name]; got == nil || *got != want {
				t.Errorf("%s: %s is not %q", of, name, want)
			}
		}
	}
}

func TestStartOrder(t *testing.T) {
	project := loadWithSecrets(t)
	const healthy, completed = types.ServiceConditionHealthy, types.ServiceConditionCompletedSuccessfully
	for name, want := range map[string]map[string]string{
		"redis":     {},
		"postgres":  {},
		"migrate":   {"postgres": healthy},
		"ingress":   {"redis": healthy, "postgres": healthy, "migrate": completed},
		"worker":    {"redis": healthy, "postgres": healthy, "migrate": completed},
		"relay":     {"redis": healthy, "postgres": healthy, "migrate": completed},
		"dashboard": {"redis": healthy, "postgres": healthy, "migrate": completed},
		"proxy":     {"ingress": healthy},
	} {
		got := service(t, project, name).DependsOn
		if len(got) != len(want) {
			t.Errorf("%s depends on %v, want %v", name, got, want)
		}
		for on, condition := range want {
			if got[on].Condition != condition {
				t.Errorf("%s depends on %s with condition %q, want %q", name, on, got[on].Condition, condition)
			}
		}
	}
}

func TestServicesAreHardened(t *testing.T) { both(t, checkHardened) }

func checkHardened(t *testing.T, project *types.Project) {
	t.Helper()
	for name, s := range project.Services {
		t.Run(name, func(t *testing.T) {
			if !s.ReadOnly {
				t.Error("its root file system is writable")
			}
			if !slices.Equal(s.CapDrop, []string{"ALL"}) || len(s.CapAdd) > 0 {
				t.Errorf("it drops capabilities %v and adds %v, want ALL dropped and none added", s.CapDrop, s.CapAdd)
			}
			if !slices.Contains(s.SecurityOpt, "no-new-privileges:true") {
				t.Errorf("its processes may gain privileges: %v", s.SecurityOpt)
			}
			if s.Privileged {
				t.Error("it is privileged")
			}
			if s.Deploy == nil || s.Deploy.Resources.Limits == nil || s.Deploy.Resources.Limits.MemoryBytes <= 0 {
				t.Error("it has no memory limit")
			}
			want := types.RestartPolicyUnlessStopped
			if slices.Contains(oneShots, name) {
				want = types.RestartPolicyNo
			}
			if s.Restart != want {
				t.Errorf("its restart policy is %q, want %q", s.Restart, want)
			}
			if s.StopGracePeriod == nil {
				t.Error("it has no stop grace period: the default of 10 s is shorter than a drain")
			}
		})
	}
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
	for name, want := range map[string][]string{
		"proxy": {"front"}, "ingress": {"back", "front"}, "worker": {"back"}, "relay": {"back", "front"},
		"dashboard": {"back", "desk"},
		"migrate":   {"back"}, "redis": {"back"}, "postgres": {"back"},
	} {
		s := service(t, project, name)
		if got := slices.Sorted(slices.Values(s.NetworksByPriority())); !slices.Equal(got, want) {
			t.Errorf("%s is on %v, want %v", name, got, want)
		}
	}
}

func TestDefaultAuthIsJWT(t *testing.T) {
	if got := service(t, loadWithSecrets(t), "ingress").Environment["STAMPEDE_AUTH"]; got == nil || *got != "jwt" {
		t.Error("STAMPEDE_AUTH is not jwt")
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
