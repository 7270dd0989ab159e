#!/bin/sh
# Makes sure that a Redis and a Postgres can be started here, for development, demo and tests.
# Installs what is missing by apt where it may (root, or sudo that asks for no password); where it
# may not, says what to do and fails. Servers named by REDIS_URL and DATABASE_URL need nothing here.
set -eu

have_redis() {
	command -v redis-server >/dev/null
}

have_postgres() {
	command -v postgres >/dev/null && return
	# Debian and Red Hat keep the server's programs out of PATH.
	for program in /usr/lib/postgresql/*/bin/postgres /usr/pgsql-*/bin/postgres; do
		[ -x "$program" ] && return
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
policy=/usr/sbin/policy-rc.d
allow_starting() { :; }
if [ ! -e "$policy" ]; then
	allow_starting() { $as_root rm -f "$policy"; }
	trap allow_starting EXIT
	trap 'exit 129' HUP
	trap 'exit 130' INT
	trap 'exit 143' TERM
	# shellcheck disable=SC2016 # $1 is the inner shell's
	$as_root sh -c 'printf "#!/bin/sh\nexit 101\n" >"$1" && chmod 755 "$1"' sh "$policy"
fi

echo "setup: installing $packages"
# shellcheck disable=SC2086 # a list of words: the command and its packages
{
	$as_root apt-get -qq update || give_up "apt-get update failed."
	$as_root DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $packages >/dev/null ||
		give_up "apt-get install failed."
}

packages=$(missing | paste -s -d ' ' -)
[ -z "$packages" ] || give_up "apt-get installed it, and it is still not found."
