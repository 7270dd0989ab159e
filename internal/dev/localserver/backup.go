package localserver

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
)

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
