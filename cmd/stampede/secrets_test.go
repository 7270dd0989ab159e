//go:build system

package main

import (
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

// Flags whose value must not be seen can be read from files.
func TestEachSecretHasFile(t *testing.T) {
	t.Parallel()
	found := map[string]bool{}
	for _, leaf := range leaves(t) {
		for _, group := range leaf.AllFlags(true) {
			for _, flag := range group {
				_, file := secretFile(flag)
				found[file] = true
				secret := strings.HasSuffix(flag.Name, "-secret") || strings.HasSuffix(flag.Name, "-token") ||
					flag.Name == "redis-url" || flag.Name == "database-url"
				assert.Equal(t, secret, file != "", "%s --%s", leaf.Path(), flag.Name)
			}
		}
	}
	for _, file := range secretFiles {
		assert.True(t, found[file], "no flag has the variable of %s", file)
	}
	var out, errs strings.Builder
	require.Equal(t, exitOK, run([]string{"serve", "--help"}, &out, &errs))
	for _, file := range secretFiles {
		assert.Contains(t, out.String(), "$"+file)
	}
}

func TestSecretsAreReadFromFiles(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	c := testkit.Command(t, "serve", "--auth=header", "--http-addr=127.0.0.1:0", "--stop-delay=0s",
		"--key-prefix="+s.keys.Prefix)
	c.Setenv("REDIS_URL", "") // as compose passes on what is not set
	c.Setenv("DATABASE_URL", "")
	c.Setenv("REDIS_URL_FILE", file(t, testkit.RedisURL(t)+"\n"))
	c.Setenv("DATABASE_URL_FILE", file(t, testkit.DatabaseURL(t)+"\r\n"))
	c.Setenv("STAMPEDE_ADMIN_TOKEN_FILE", file(t, "from-a-file\n"))
	c.Start()
	url := "http://" + loggedAddr(c, "ingress listens")
	for token, want := range map[string]int{"from-a-file": http.StatusOK, "another": http.StatusUnauthorized} {
		status, text := call(t, http.MethodGet, url+"/v1/admin/orders?user=ann", "", "Authorization", "Bearer "+token)
		assert.Equal(t, want, status, text)
	}

	// A flag wins, also over a file that cannot be read.
	list := s.command("sale", "list", "--redis-url="+testkit.RedisURL(t), "--database-url="+testkit.DatabaseURL(t))
	list.Setenv("REDIS_URL_FILE", "/none")
	list.Setenv("DATABASE_URL_FILE", "/none")
	list.Start()
	assert.Equal(t, exitOK, list.Wait(within).ExitCode(), list.Output())
}

// The processes of a demo get its own servers and token, not the files.
func TestDemoTakesSecretsFromFiles(t *testing.T) {
	t.Parallel()
	c := demoCommand(t)
	c.Setenv("REDIS_URL", "")
	c.Setenv("REDIS_URL_FILE", file(t, testkit.RedisURL(t)))
	c.Setenv("STAMPEDE_ADMIN_TOKEN_FILE", file(t, "another"))
	c.Start()
	assert.Equal(t, exitOK, c.Wait(within).ExitCode())
}

func TestSecretFileErrorsNameVariableAndPath(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	none := filepath.Join(folder, "none")
	for name, c := range map[string]struct {
		path, other, want string
	}{
		"missing":   {none, "", "REDIS_URL_FILE: open " + none + ": no such file or directory"},
		"folder":    {folder, "", "REDIS_URL_FILE: read " + folder + ": is a directory"},
		"empty":     {file(t, " \n"), "", "/secret is empty"},
		"too long":  {file(t, strings.Repeat("hunter2-", 2049)), "", "/secret is longer than 16384 bytes"},
		"both":      {file(t, "redis://:hunter2@localhost"), "redis://:hunter2@localhost", "both REDIS_URL and REDIS_URL_FILE are set: unset one of them"},
		"malformed": {file(t, "hunter2"), "", "REDIS_URL"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run := testkit.Command(t, "sale", "list", "--database-url=postgres://localhost/none")
			run.Setenv("REDIS_URL", c.other)
			run.Setenv("REDIS_URL_FILE", c.path)
			run.Start()
			assert.Equal(t, exitUsage, run.Wait(within).ExitCode())
			assert.Contains(t, run.Output(), c.want)
			assert.NotContains(t, run.Output(), "hunter2")
			assert.Equal(t, 1, strings.Count(run.Output(), "\n"), run.Output())
		})
	}
}
