//go:build system

package main

import (
	"compress/gzip"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

// Profiles are for operators: on request, and never where buyers are.
func TestProfilesAreServedToOperatorsOnly(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	const heap, processor, commandLine = "/debug/pprof/heap", "/debug/pprof/profile?seconds=1", "/debug/pprof/cmdline"
	services := map[string]func() *testkit.Cmd{
		"ingress": func() *testkit.Cmd { return s.ingress() },
		"worker":  func() *testkit.Cmd { return s.worker("worker") },
		"relay":   s.relay,
		"dev": func() *testkit.Cmd {
			c := s.command("dev")
			c.Setenv("STAMPEDE_HTTP_ADDR", "127.0.0.1:0")
			return c
		},
	}
	for name, service := range services {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			without := service()
			without.Setenv("STAMPEDE_METRICS_ADDR", "127.0.0.1:0")
			without.Start()
			operators := "http://" + loggedAddr(without, "metrics are served")
			status, _ := call(t, http.MethodGet, operators+heap, "")
			require.Equal(t, http.StatusNotFound, status)

			with := service()
			with.Setenv("STAMPEDE_CONSUMER", name) // two workers on one host
			with.Setenv("STAMPEDE_METRICS_ADDR", "127.0.0.1:0")
			with.Setenv("STAMPEDE_PPROF", "true")
			with.Start()
			operators = "http://" + loggedAddr(with, "metrics are served")
			for path, unit := range map[string]string{heap: "inuse_space", processor: "nanoseconds"} {
				status, profile := call(t, http.MethodGet, operators+path, "")
				require.Equal(t, http.StatusOK, status)
				unpacked, err := gzip.NewReader(strings.NewReader(profile))
				require.NoError(t, err)
				text, err := io.ReadAll(unpacked)
				require.NoError(t, err)
				require.Contains(t, string(text), unit)
			}
			status, _ = call(t, http.MethodGet, operators+commandLine, "")
			require.Equal(t, http.StatusNotFound, status, "it may hold secrets")
			if name == "ingress" {
				testkit.Eventually(t, within, "it is ready", func() bool {
					status, _ := call(t, http.MethodGet, operators+"/readyz", "")
					return status == http.StatusOK
				})
				require.NotEmpty(t, scrape(t, operators))
				buyers := "http://" + loggedAddr(with, "ingress listens")
				for _, path := range []string{heap, processor, "/debug/pprof/", commandLine} {
					status, _ := call(t, http.MethodGet, buyers+path, "")
					require.Equal(t, http.StatusNotFound, status, path)
				}
			}
		})
	}
}

func TestProfilesNeedListenerOfOperators(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for _, command := range []string{"serve", "dev"} {
		c := s.command(command, "--pprof")
		c.Setenv("STAMPEDE_AUTH", "header")
		c.Start()
		require.Equal(t, exitUsage, c.Wait(within).ExitCode())
		require.Contains(t, c.Output(), "set STAMPEDE_METRICS_ADDR or --metrics-addr")
	}
}
