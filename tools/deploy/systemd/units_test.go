// Package systemd checks deploy/systemd: the units against systemd-analyze, the documentation and the program, which
// it runs with their commands, settings and credentials.
package systemd

import (
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"stampede/tools/deploy/program"
)

func TestMain(m *testing.M) { program.Main(m) }

const (
	folder  = program.Root + "/deploy/systemd"
	binary  = "/usr/local/bin/stampede"
	secrets = "/etc/stampede/secrets/"
	// exposureMax is ten times what `systemd-analyze security` may give a unit, of 10.
	exposureMax = 15
)

// unit holds the settings of the section Service, in their order.
type unit struct {
	name    string
	text    string
	service map[string][]string
}

func units(t *testing.T) []unit {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(folder, "*.service"))
	if err != nil || len(files) != 5 {
		t.Fatalf("%d units (%v), want 5", len(files), err)
	}
	var all []unit
	for _, file := range files {
		text := program.Read(t, file)
		u := unit{filepath.Base(file), text, map[string][]string{}}
		section := ""
		for line := range strings.Lines(text) {
			line = strings.TrimSpace(line)
			name, value, isSetting := strings.Cut(line, "=")
			switch {
			case line == "" || strings.HasPrefix(line, "#"):
			case strings.HasPrefix(line, "["):
				section = line
			case !isSetting:
				t.Fatalf("%s: %s", file, line)
			case section == "[Service]":
				u.service[name] = append(u.service[name], value)
			}
		}
		all = append(all, u)
	}
	return all
}

// one returns the only value of a setting.
func (u unit) one(t *testing.T, setting string) string {
	t.Helper()
	if values := u.service[setting]; len(values) != 1 {
		t.Fatalf("%s has %d values of %s: %v", u.name, len(values), setting, values)
	}
	return u.service[setting][0]
}

func (u unit) command(t *testing.T) []string {
	t.Helper()
	words := strings.Fields(u.one(t, "ExecStart"))
	if words[0] != binary {
		t.Fatalf("%s runs %s", u.name, words[0])
	}
	return words[1:]
}

func (u unit) isOneshot() bool { return slices.Equal(u.service["Type"], []string{"oneshot"}) }

// shared returns the settings of stampede.env, and those that it holds as examples, behind a #.
func shared(t *testing.T) (values, examples map[string]string) {
	t.Helper()
	values, examples = map[string]string{}, map[string]string{}
	for line := range strings.Lines(program.Read(t, folder+"/stampede.env")) {
		name, value, isSetting := strings.Cut(strings.TrimSpace(line), "=")
		switch example, isExample := strings.CutPrefix(name, "#"); {
		case !isSetting:
		case isExample:
			examples[example] = value
		default:
			values[name] = value
		}
	}
	return values, examples
}

func TestCommands(t *testing.T) {
	want := map[string]string{
		"stampede-ingress.service": "serve", "stampede-worker@.service": "work", "stampede-relay.service": "relay run",
		"stampede-dashboard.service": "dashboard", "stampede-migrate.service": "migrate up",
	}
	for _, u := range units(t) {
		if got := strings.Join(u.command(t), " "); got != want[u.name] {
			t.Errorf("%s runs %s, want %s", u.name, got, want[u.name])
		}
	}
}

// systemd itself reads the units. It looks for the program, so that gets the path of a built one.
func TestSystemdAnalyze(t *testing.T) {
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Fatal("systemd-analyze is missing: apt-get install systemd")
	}
	copies := t.TempDir()
	for _, u := range units(t) {
		name := strings.Replace(u.name, "@.", "@1.", 1)
		text := strings.ReplaceAll(u.text, binary, program.Path(t))
		path := filepath.Join(copies, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := exec.CommandContext(t.Context(), "systemd-analyze", "verify", "--man=no", path).CombinedOutput()
		if err != nil || len(out) > 0 {
			t.Errorf("%s: %v: %s", u.name, err, out)
		}
		out, err = exec.CommandContext(t.Context(), "systemd-analyze", "security", "--offline=true", "--no-pager",
			fmt.Sprintf("--threshold=%d", exposureMax), path).CombinedOutput()
		if err != nil {
			t.Errorf("%s is exposed by more than %d tenths: %s", u.name, exposureMax, out)
		}
	}
}

// hardening is what all units have, from this line on.
const hardening = "# As little as it needs"

func TestUnitsAreHardenedAlike(t *testing.T) {
	var first string
	for _, u := range units(t) {
		_, rest, found := strings.Cut(u.text, hardening)
		if !found {
			t.Fatalf("%s has no line %s", u.name, hardening)
		}
		rest, _, _ = strings.Cut(rest, "\n[Install]")
		if rest = strings.TrimSpace(rest); first == "" {
			first = rest
		}
		if rest != first {
			t.Errorf("%s is not hardened like the others", u.name)
		}
	}
	for _, want := range []string{"DynamicUser=yes", "ProtectSystem=strict", "SystemCallFilter=@system-service"} {
		if !strings.Contains(first, want) {
			t.Errorf("the units lack %s", want)
		}
	}
}

// What is killed before it has finished costs buyers an answer, and orders a wait.
func TestTimeoutsCoverStops(t *testing.T) {
	settings, _ := shared(t)
	for _, u := range units(t) {
		if u.isOneshot() {
			continue
		}
		timeout, err := time.ParseDuration(u.one(t, "TimeoutStopSec"))
		if err != nil {
			t.Fatal(err)
		}
		if takes := program.StopTime(t, settings, u.command(t)[0]); timeout < takes {
			t.Errorf("%s is killed after %v, and its stop may take %v", u.name, timeout, takes)
		}
		if u.one(t, "Restart") != "always" || u.one(t, "LimitNOFILE") == "" {
			t.Errorf("%s is not started again", u.name)
		}
		if !strings.Contains(u.text, "StartLimitIntervalSec=0\n") {
			t.Errorf("%s is given up after a few starts", u.name)
		}
	}
}

// Each variable of a unit is one that its command reads, and each of the shared file one that some command reads.
func TestVariablesAreThoseOfTheCommand(t *testing.T) {
	everywhere := map[string]bool{}
	for _, u := range units(t) {
		own := map[string]string{}
		for _, assignment := range u.service["Environment"] {
			name, value, _ := strings.Cut(assignment, "=")
			own[name] = value
		}
		program.RequireVariables(t, u.command(t), own)
		maps.Copy(everywhere, program.Variables(t, u.command(t)))
	}
	values, examples := shared(t)
	for _, settings := range []map[string]string{values, examples} {
		for name := range settings {
			if !everywhere[name] {
				t.Errorf("stampede.env: nothing reads %s", name)
			}
		}
	}
}

var written = regexp.MustCompile(`(?m)> ([a-z-]+)$`)

func TestCredentialsAreSecretsThatAreDocumented(t *testing.T) {
	used := map[string]bool{}
	for _, u := range units(t) {
		for _, credential := range u.service["LoadCredential"] {
			name, file, _ := strings.Cut(credential, ":")
			file, inFolder := strings.CutPrefix(file, secrets)
			used[file] = true
			if !inFolder {
				t.Errorf("%s: %s is not in %s", u.name, file, secrets)
			}
			if !slices.ContainsFunc(u.service["Environment"], func(assignment string) bool {
				return strings.HasSuffix(assignment, "_FILE=%d/"+name)
			}) {
				t.Errorf("%s does not use the credential %s", u.name, name)
			}
		}
	}
	program.RequireDocumented(t, program.Read(t, folder+"/README.md"), written, used)
}

// The program runs with the command, the settings and the credentials of each unit, becomes ready and stops in time.
func TestUnitsRun(t *testing.T) {
	servers := program.Start(t)
	for _, u := range units(t) {
		t.Run(u.name, func(t *testing.T) {
			t.Parallel()
			credentials := t.TempDir()
			for _, credential := range u.service["LoadCredential"] {
				name, file, _ := strings.Cut(credential, ":")
				content := servers.Secrets()[strings.TrimPrefix(file, secrets)] + "\n"
				if err := os.WriteFile(filepath.Join(credentials, name), []byte(content), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			env, probed := u.environment(t, credentials)
			p := program.Run(t, u.command(t), env)
			if u.isOneshot() {
				if err := p.Wait(); err != nil {
					t.Errorf("%v:\n%s", err, p.Output())
				}
				return
			}
			p.Answer("http://"+probed+"/readyz", http.StatusOK)
			timeout, err := time.ParseDuration(u.one(t, "TimeoutStopSec"))
			if err != nil {
				t.Fatal(err)
			}
			p.Stop(timeout)
			if err := p.Wait(); err != nil {
				t.Errorf("it ends with %v:\n%s", err, p.Output())
			}
		})
	}
}

var instance = regexp.MustCompile(`stampede-[a-z]+(@)?`)

// The runbook's shell reads the files of the host, after which commands need no flags, and names units that exist.
func TestShellOfRunbook(t *testing.T) {
	servers, etc, shell := program.Start(t), t.TempDir(), program.Shell(t, "systemd")
	files := map[string]string{"stampede.env": program.Read(t, folder+"/stampede.env")}
	for name, content := range servers.Secrets() {
		files["secrets/"+name] = content + "\n"
	}
	if err := os.Mkdir(filepath.Join(etc, "secrets"), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(etc, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	settings, manage, _ := strings.Cut(shell, "set +a\n")
	cmd := exec.CommandContext(t.Context(), "sh", "-euc", strings.ReplaceAll(settings, "/etc/stampede", etc)+
		`"$0" audit && "$0" top --once`, program.Path(t))
	cmd.Env = []string{}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "\n127.0.0.1:9101 ") {
		t.Errorf("%v: %s", err, out)
	}
	all := units(t)
	for _, name := range instance.FindAllString(manage, -1) {
		if !slices.ContainsFunc(all, func(u unit) bool { return u.name == name+".service" }) {
			t.Errorf("there is no unit %s", name)
		}
	}
}

var address = regexp.MustCompile(`^STAMPEDE_[A-Z_]*ADDR=`)

// environment returns the environment of a unit, with free ports, and the address of its probes.
func (u unit) environment(t *testing.T, credentials string) (env []string, probed string) {
	t.Helper()
	if u.one(t, "EnvironmentFile") != "/etc/stampede/stampede.env" {
		t.Errorf("%s does not read stampede.env", u.name)
	}
	env = []string{"STAMPEDE_HTTP_ADDR=127.0.0.1:" + program.FreePort(t)}
	values, _ := shared(t)
	for name, value := range values {
		env = append(env, name+"="+value)
	}
	place := strings.NewReplacer("%d", credentials, "%H", "host", "%i", "1")
	for _, assignment := range u.service["Environment"] {
		assignment = place.Replace(assignment)
		if address.MatchString(assignment) {
			probed = "127.0.0.1:" + program.FreePort(t)
			assignment = address.FindString(assignment) + probed
		}
		env = append(env, assignment)
	}
	return env, probed
}
