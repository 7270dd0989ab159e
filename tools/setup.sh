#!/bin/sh
# Makes sure that a Redis and a Postgres can be started here, for development, demo and tests.
# Installs what is missing by apt where it may (root, or sudo that asks for no password); where it
# may not, says what to do and fails. Servers named by REDIS_URL and DATABASE_URL need nothing here.
set -eu

# Both look where internal/localserver looks for the servers that it starts.
have_redis() {
	for name in redis-server valkey-server; do
		command -v "$name" >/dev/null && return
		for folder in /usr/bin /usr/local/bin /usr/sbin /opt/homebrew/bin; do
			[ ! -x "$folder/$name" ] || return 0
		done
	done
	return 1
}

have_postgres() {
	command -v initdb >/dev/null && command -v postgres >/dev/null && return
	# Most packages keep the server's programs out of PATH.
	for folder in /usr/lib/postgresql/*/bin /usr/pgsql-*/bin \
		/opt/homebrew/opt/postgresql@*/bin /usr/local/opt/postgresql@*/bin; do
		[ ! -x "$folder/initdb" ] || [ ! -x "$folder/postgres" ] || return 0
	done
	return 1
}

# missing lists the packages that are needed and not there.
missing() {
	[ -n "${REDIS_URL:-}" ] || have_redis || echo redis-server
	[ -n "${DATABASE_URL:-}" ] || have_postgres || echo postgresql
}

give_up() {
	cat >&2 <<-MESSAGE
		setup: $1
		Stampede needs Redis (7.0 or newer) and Postgres (15 or newer). Missing here: $packages. One of these helps:
		  Debian, Ubuntu (as root):  apt-get update && apt-get install -y --no-install-recommends $packages
		  macOS:                     brew install redis postgresql
		  servers of your own:       export REDIS_URL=redis://HOST:6379/0 DATABASE_URL=postgres://USER:PASSWORD@HOST:5432/NAME
	MESSAGE
	exit 1
}

packages=$(missing | paste -s -d ' ' -)
[ -n "$packages" ] || exit 0

command -v apt-get >/dev/null || give_up "there is no apt-get here to install with."
if [ "$(id -u)" = 0 ]; then
	as_root="env"
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
	as_root="sudo -n env"
else
	give_up "installing takes root, or sudo without a password."
fi

# The packages start their servers once they are installed. Stampede runs private ones of its own, and
# nobody asked for more, so invoke-rc.d is told no for the while (exit status 101: action forbidden).
log=$(mktemp)
policy=/usr/sbin/policy-rc.d
allow_starting() { :; }
clean_up() {
	rm -f "$log"
	allow_starting
}
trap clean_up EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
if [ ! -e "$policy" ]; then
	allow_starting() { $as_root rm -f "$policy"; }
	# shellcheck disable=SC2016 # $1 is the inner shell's
	$as_root sh -c 'printf "#!/bin/sh\nexit 101\n" >"$1" && chmod 755 "$1"' sh "$policy"
fi

echo "setup: installing $packages"
# An update that fails may have failed for a source that has nothing to do with this: the installation tells.
# shellcheck disable=SC2086 # $as_root and $packages are lists of words
{
	$as_root apt-get -q update >"$log" 2>&1 || :
	$as_root DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends $packages >>"$log" 2>&1 || {
		cat "$log" >&2
		give_up "apt-get could not install it."
	}
	# Not at the next boot either. Each package's unit has its name; where there is no systemd, nothing to do.
	$as_root systemctl --quiet disable $packages >/dev/null 2>&1 || :
}

packages=$(missing | paste -s -d ' ' -)
[ -z "$packages" ] || give_up "apt-get installed it, and it is still not found."
