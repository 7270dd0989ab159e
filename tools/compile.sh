#!/bin/sh
# Compiles packages, and says every few seconds how far that is, because the first time takes minutes:
#   compile.sh OUTPUT [FLAG…] PACKAGE…
# go itself names the modules that it downloads. Packages that are compiled already do not count.
set -eu

output=$1
shift
folder=$(mktemp -d)
# What go build -v writes when it begins a package: only these lines have no space and no colon.
name='^[^ :]*$'

tell() {
	while sleep 3 >/dev/null 2>&1; do # a sleep outlives its shell, and must not keep the output open
		if [ -e "$folder/log" ]; then
			begun=$(grep -c "$name" "$folder/log") || :
			latest=$(grep "$name" "$folder/log" | tail -n 1)
			echo "compiling: $begun of $(wc -l <"$folder/packages") packages${latest:+, now $latest}"
		else
			echo "compiling: looking for modules and packages"
		fi
	done
}

tell &
teller=$!
trap 'kill $teller 2>/dev/null || :; rm -rf "$folder"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
go list -deps -f '{{if .Stale}}{{.ImportPath}}{{end}}' "$@" >"$folder/packages"
# In the foreground, so that an interrupt ends it.
status=0
go build -v -o "$output" "$@" 2>"$folder/log" || status=$?
grep -v "$name" "$folder/log" >&2 || :
exit $status
