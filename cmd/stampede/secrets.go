package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
)

// secretFiles are the variables that name a file with a secret, each in place of the variable without _FILE.
var secretFiles = []string{
	"REDIS_URL_FILE", "DATABASE_URL_FILE", "STAMPEDE_ADMIN_TOKEN_FILE", "STAMPEDE_JWT_SECRET_FILE",
	"STAMPEDE_RECEIPT_SECRET_FILE",
}

// secretMax bounds a secret in a file.
const secretMax = 16 << 10

// secretFile returns the variable of the file for a flag, or "" if the flag is no secret.
func secretFile(flag *kong.Flag) (variable, file string) {
	for _, env := range flag.Envs {
		if slices.Contains(secretFiles, env+"_FILE") {
			return env, env + "_FILE"
		}
	}
	return "", ""
}

// secretsFromFiles reads secrets that are given neither by a flag nor by a variable. An empty variable is none, because
// compose files pass unset ones on as empty.
var secretsFromFiles kong.ResolverFunc = func(_ *kong.Context, _ *kong.Path, flag *kong.Flag) (any, error) {
	variable, file := secretFile(flag)
	path := os.Getenv(file)
	switch {
	case file == "" || path == "":
		return nil, nil //nolint:nilnil // kong's answer for "not here"
	case os.Getenv(variable) != "":
		return nil, fmt.Errorf("both %s and %s are set: unset one of them", variable, file)
	}
	secret, err := readSecret(path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return secret, nil
}

// readSecret returns the content of a file without a line break at its end. Its errors never have the content.
func readSecret(path string) (string, error) {
	file, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer func() { _ = file.Close() }()
	content, err := io.ReadAll(io.LimitReader(file, secretMax+1))
	secret := strings.TrimSuffix(strings.TrimSuffix(string(content), "\n"), "\r")
	switch {
	case err != nil:
		return "", err
	case len(content) > secretMax:
		return "", fmt.Errorf("%s is longer than %d bytes", path, secretMax)
	case strings.TrimSpace(secret) == "":
		return "", fmt.Errorf("%s is empty", path)
	}
	return secret, nil
}

// secretsHelp adds the variable of the file to the help of a secret.
func secretsHelp(value *kong.Value) string {
	text := kong.DefaultHelpValueFormatter(value)
	if value.Flag != nil {
		if variable, file := secretFile(value.Flag); file != "" {
			return strings.Replace(text, "$"+variable, "$"+variable+", $"+file, 1)
		}
	}
	return text
}
