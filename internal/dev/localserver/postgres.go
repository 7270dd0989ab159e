package localserver

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"

	"stampede/internal/dev/child"
)

// PostgresOptions configures a private Postgres.
type PostgresOptions struct {
	// Settings add to or replace the defaults, as in postgresql.conf ("log_statement": "all").
	Settings map[string]string
	// Env adds to the environment of the server ("LD_PRELOAD=…").
	Env []string
	// Archive keeps the log of all changes, for Backup and Restore.
	Archive bool
}

// Postgres is a private Postgres server with fsync on. Every local user has full access to it: it is for
// development and tests. Its methods are safe for concurrent use.
type Postgres struct {
	URL    string
	server *server
}

// StartPostgres starts a private Postgres and waits until it serves. The server outlives ctx.
func StartPostgres(ctx context.Context, o PostgresOptions) (*Postgres, error) {
	programs, found := findPostgres()
	if !found {
		return nil, notInstalled(postgresPrograms)
	}
	s, err := newServer("Postgres", filepath.Join(programs, "postgres"), syscall.SIGINT)
	if err != nil {
		return nil, err
	}
	data := filepath.Join(s.folder.path, "data")
	err = makeCluster(ctx, programs, data, s.folder, s.account)
	settings := o.Settings
	if err == nil && o.Archive {
		settings, err = archiveSettings(s.folder, s.account, o.Settings)
	}
	if err != nil {
		s.folder.remove()
		return nil, err
	}
	s.env = o.Env
	s.args = func(port int) []string { return postgresArgs(data, port, settings) }
	if err := s.start(ctx, freePort); err != nil {
		return nil, err
	}
	return &Postgres{
		URL:    fmt.Sprintf("postgres://%s@127.0.0.1:%d/postgres?sslmode=disable", superuser, s.port),
		server: s,
	}, nil
}

func postgresArgs(data string, port int, override map[string]string) []string {
	settings := map[string]string{
		"port":             strconv.Itoa(port),
		"listen_addresses": "127.0.0.1",
		// The path of a socket is limited to 107 bytes, which a temporary folder can exceed.
		"unix_socket_directories": "",
		"max_connections":         "200",
		"fsync":                   "on",
	}
	maps.Copy(settings, override)
	args := []string{"-D", data}
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		args = append(args, "-c", name+"="+settings[name])
	}
	return args
}

// Stop stops the server, without a checkpoint, and removes its data.
func (p *Postgres) Stop() { p.server.stop(syscall.SIGQUIT) }

// StopImmediate ends the server like a crash: all connections break and the next start recovers from
// the log. The data stays for Restart.
func (p *Postgres) StopImmediate() { p.server.interrupt(syscall.SIGQUIT) }

// Restart starts the server on the same port and data. A running server is stopped cleanly first.
func (p *Postgres) Restart(ctx context.Context) error { return p.server.restart(ctx) }

// Pid is the process id of the server, 0 while it is down.
func (p *Postgres) Pid() int { return p.server.pid() }

const superuser = "stampede"

// initdbArgs: no sync, because an unused cluster need not survive a power loss. The server syncs its own writes.
var initdbArgs = []string{
	"--no-sync", "--no-instructions", "--auth=trust", "--username=" + superuser,
	"--encoding=UTF8", "--no-locale",
}

// makeCluster fills the new folder data with an empty cluster. initdb takes longer than the rest of a
// start, so its result is kept as a template and copied.
func makeCluster(ctx context.Context, programs, data string, f *serverFolder, a account) error {
	template, err := templateFolder(programs, filepath.Dir(f.path))
	if err != nil {
		return err
	}
	if _, err := os.Stat(template); errors.Is(err, os.ErrNotExist) {
		fresh := filepath.Join(f.path, "template")
		if err := initdb(ctx, programs, fresh, f, a); err != nil {
			return err
		}
		// The first process wins, and an existing template is complete: rename is atomic and does not
		// replace a folder with files.
		if err := os.Rename(fresh, template); err != nil && !errors.Is(err, os.ErrExist) &&
			!errors.Is(err, syscall.ENOTEMPTY) {
			return fmt.Errorf("keep the Postgres template: %w", err)
		}
	}
	if err := os.CopyFS(data, os.DirFS(template)); err != nil {
		return fmt.Errorf("copy the Postgres template: %w", err)
	}
	if err := os.Chmod(data, 0o700); err != nil {
		return err
	}
	return a.own(data)
}

// templateFolder returns the path of the template, with a hash of everything that it depends on.
func templateFolder(programs, base string) (string, error) {
	binary, err := filepath.EvalSymlinks(filepath.Join(programs, "initdb"))
	if err != nil {
		return "", err
	}
	info, err := os.Stat(binary)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %d %d %q", binary, info.Size(), info.ModTime().UnixNano(), initdbArgs))
	return filepath.Join(base, fmt.Sprintf("cluster-%x", sum[:8])), nil
}

func initdb(ctx context.Context, programs, data string, f *serverFolder, a account) error {
	ctx, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	out := newOutput(readyMark)
	cmd := exec.Command(filepath.Join(programs, "initdb"), append([]string{"--pgdata=" + data}, initdbArgs...)...)
	cmd.Dir = f.path
	cmd.Env = serverEnv()
	cmd.Stdout, cmd.Stderr = out, out
	cmd.ExtraFiles = []*os.File{f.lock}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: a.credential}
	process, err := child.Start(cmd, syscall.SIGKILL)
	if err != nil {
		return fmt.Errorf("initdb: %w", err)
	}
	select {
	case <-process.Done():
	case <-ctx.Done():
		process.Stop(syscall.SIGKILL, stopWithin)
	}
	if err := process.Wait(); err != nil {
		return fmt.Errorf("initdb: %w; it wrote:\n%s", errors.Join(err, ctx.Err()), out)
	}
	return nil
}

// archiveFolder is where a Postgres with PostgresOptions.Archive keeps its log.
const archiveFolder = "archive"

func archiveSettings(f *serverFolder, a account, settings map[string]string) (map[string]string, error) {
	archive := filepath.Join(f.path, archiveFolder)
	if err := os.Mkdir(archive, 0o700); err != nil {
		return nil, err
	}
	all := map[string]string{
		"archive_mode":    "on",
		"archive_command": fmt.Sprintf("test ! -f '%[1]s/%%f' && cp '%%p' '%[1]s/%%f'", archive),
	}
	maps.Copy(all, settings)
	return all, a.own(archive)
}

// Backup copies the running server's data with pg_basebackup, and returns the folder.
func (p *Postgres) Backup(ctx context.Context) (folder string, err error) {
	folder = filepath.Join(p.server.folder.path, "backup")
	if err := p.server.tool(ctx, "pg_basebackup", "-h", "127.0.0.1", "-p", strconv.Itoa(p.server.port), "-U", superuser,
		"-D", folder, "--checkpoint=fast", "--no-sync"); err != nil {
		return "", err
	}
	return folder, p.server.tool(ctx, "pg_verifybackup", folder)
}

// Restore ends the server like a crash, and starts it from a backup, with the archived log up to a restore point
// (pg_create_restore_point). The log from the point on is not applied.
func (p *Postgres) Restore(ctx context.Context, backup, point string) error {
	p.StopImmediate()
	folder := p.server.folder.path
	data := filepath.Join(folder, "data")
	if err := os.RemoveAll(data); err != nil {
		return err
	}
	if err := os.CopyFS(data, os.DirFS(backup)); err != nil {
		return fmt.Errorf("copy the backup: %w", err)
	}
	recovery := fmt.Sprintf("restore_command = 'cp \"%s/%%f\" \"%%p\"'\nrecovery_target_name = '%s'\n"+
		"recovery_target_action = 'promote'\nhot_standby = 'off'\n", filepath.Join(folder, archiveFolder), point)
	for name, text := range map[string]string{"recovery.signal": "", "postgresql.auto.conf": recovery} {
		if err := os.WriteFile(filepath.Join(data, name), []byte(text), 0o600); err != nil {
			return err
		}
	}
	if err := os.Chmod(data, 0o700); err != nil {
		return err
	}
	if err := p.server.account.own(data); err != nil {
		return err
	}
	return p.Restart(ctx)
}

// tool runs a program that is beside the server's.
func (s *server) tool(ctx context.Context, name string, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	server, err := filepath.EvalSymlinks(s.binary) // PATH may have a link to the server only
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, filepath.Join(filepath.Dir(server), name), args...)
	cmd.Dir, cmd.Env = s.folder.path, serverEnv()
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: s.account.credential}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w; it wrote:\n%s", name, err, out)
	}
	return nil
}

// CopyData copies the append-only file of the server to a folder for ReplaceData, and returns it.
func (r *Redis) CopyData() (folder string, err error) {
	folder = filepath.Join(r.server.folder.path, "copy")
	return folder, os.CopyFS(folder, os.DirFS(filepath.Join(r.server.folder.path, appendFolder)))
}

// ReplaceData kills the server and starts it with the data in a folder, or without data if the folder is "".
func (r *Redis) ReplaceData(ctx context.Context, folder string) error {
	r.Kill()
	data := filepath.Join(r.server.folder.path, appendFolder)
	if err := os.RemoveAll(data); err != nil {
		return err
	}
	if folder != "" {
		if err := os.CopyFS(data, os.DirFS(folder)); err != nil {
			return err
		}
		if err := r.server.account.own(data); err != nil {
			return err
		}
	}
	return r.Restart(ctx)
}

// appendFolder is Redis' default for the folder of its append-only file.
const appendFolder = "appendonlydir"
