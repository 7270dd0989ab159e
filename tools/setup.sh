#!/bin/sh
# Makes sure that Redis and Postgres can be started here, for development, demo and tests. Installs what is
# missing with apt if allowed (root, or sudo without a password). Otherwise it prints what to install and fails.
# Servers that REDIS_URL and DATABASE_URL name need no packages. "setup.sh chromium" does the same for Chromium, which
# only the tests of the dashboard and of examples/shop need, and "setup.sh proxies" for HAProxy and PgBouncer,
# which only those of deploy need. Without an argument it also compiles task, which its first use would do in silence.
set -eu

# have searches for one of the programs. It and have_postgres search where internal/dev/localserver does.
have() {
	for name in "$@"; do
		command -v "$name" >/dev/null && return
		for folder in /usr/bin /usr/local/bin /usr/sbin /opt/homebrew/bin; do
			[ ! -x "$folder/$name" ] || return 0
		done
	done
	return 1
}

have_postgres() {
	command -v initdb >/dev/null && command -v postgres >/dev/null && return
	# Most packages install the server programs outside PATH.
	for folder in /usr/lib/postgresql/*/bin /usr/pgsql-*/bin \
		/opt/homebrew/opt/postgresql@*/bin /usr/local/opt/postgresql@*/bin; do
		[ ! -x "$folder/initdb" ] || [ ! -x "$folder/postgres" ] || return 0
	done
	return 1
}

# have_promtool: tests check metrics and alerts with it, and run the server of the same package and Alertmanager.
have_promtool() {
	command -v promtool >/dev/null && command -v prometheus >/dev/null && command -v prometheus-alertmanager >/dev/null
}

# have_faketime: tests set the clock of a Postgres with it. It searches where internal/test/testkit does.
have_faketime() {
	for library in /usr/lib/*/faketime/libfaketimeMT.so.1 /usr/lib/faketime/libfaketimeMT.so.1 \
		/usr/lib64/faketime/libfaketimeMT.so.1; do
		[ ! -e "$library" ] || return 0
	done
	return 1
}

cd "$(dirname "$0")/.."
given=${1:-}
wanted=${given:-servers}

# missing prints the required packages that are not installed.
missing() {
	case $wanted in
	chromium) have chromium chromium-browser google-chrome google-chrome-stable || echo chromium ;;
	proxies)
		have haproxy || echo haproxy
		have pgbouncer || echo pgbouncer
		;;
	*)
		[ -n "${REDIS_URL:-}" ] || have redis-server valkey-server || echo redis-server
		[ -n "${DATABASE_URL:-}" ] || have_postgres || echo postgresql
		;;
	esac
}

fail() {
	if [ "$wanted" != servers ]; then
		cat >&2 <<-MESSAGE
			setup: $1
			Some tests need more programs. Missing: $packages. Do one of these:
			  Debian (as root):  apt-get update && apt-get install -y --no-install-recommends $packages
			  elsewhere:         install them (Google Chrome does for Chromium), and put them into PATH
		MESSAGE
		exit 1
	fi
	cat >&2 <<-MESSAGE
		setup: $1
		Stampede needs Redis (7.0 or newer) and Postgres (15 or newer). Missing: $packages. Do one of these:
		  Debian, Ubuntu (as root):  apt-get update && apt-get install -y --no-install-recommends $packages
		  macOS:                     brew install redis postgresql
		  your own servers:          export REDIS_URL=redis://HOST:6379/0 DATABASE_URL=postgres://USER:PASSWORD@HOST:5432/NAME
	MESSAGE
	exit 1
}

case $wanted in
servers | chromium | proxies) ;;
*)
	echo "setup: unknown argument $wanted; want chromium or proxies" >&2
	exit 2
	;;
esac

compile_task() {
	[ -n "$given" ] || ! command -v go >/dev/null ||
		sh tools/compile.sh /dev/null -modfile=tools/go.mod github.com/go-task/task/v3/cmd/task
}

packages=$(missing | paste -s -d ' ' -)
# Prometheus and faketime are only for tests: setup does not fail without them.
optional=
if [ "$wanted" = servers ] && command -v apt-get >/dev/null; then
	have_promtool || optional="prometheus prometheus-alertmanager"
	have_faketime || optional="$optional faketime"
fi
if [ -z "$packages$optional" ]; then
	compile_task
	exit
fi

command -v apt-get >/dev/null || fail "apt-get is not available."
if [ "$(id -u)" = 0 ]; then
	as_root="env"
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
	as_root="sudo -n env"
elif [ -z "$packages" ]; then
	echo "setup: some tests need more programs; install the packages $optional" >&2
	compile_task
	exit
else
	fail "the installation needs root, or sudo without a password."
fi

# The packages start their servers after the installation. Stampede starts private ones, so policy-rc.d forbids
# the start meanwhile (exit status 101: action forbidden).
log=$(mktemp)
# tell says every few seconds what apt-get does, because it takes a minute.
tell() {
	while sleep 3 >/dev/null 2>&1; do # a sleep outlives its shell, and must not keep the output open
		echo "setup: $(tail -n 1 "$log" | cut -c 1-100)"
	done
}
policy=/usr/sbin/policy-rc.d
teller=
allow_starting() { :; }
clean_up() {
	[ -z "$teller" ] || kill "$teller" 2>/dev/null || :
	teller=
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

echo "setup: installing $packages $optional"
tell &
teller=$!
# A failed update may concern an unrelated source, so only the installation decides.
# shellcheck disable=SC2086 # $as_root and $packages are lists of words
{
	$as_root apt-get -q update >"$log" 2>&1 || :
	[ -z "$packages" ] || $as_root DEBIAN_FRONTEND=noninteractive \
		apt-get -q install -y --no-install-recommends $packages >>"$log" 2>&1 || {
		cat "$log" >&2
		fail "apt-get could not install the packages."
	}
	[ -z "$optional" ] || $as_root DEBIAN_FRONTEND=noninteractive \
		apt-get -q install -y --no-install-recommends $optional >>"$log" 2>&1 ||
		echo "setup: apt-get could not install $optional, which some tests need" >&2
	# Do not start them at boot either. Each unit has the name of its package; without systemd this does nothing.
	$as_root systemctl --quiet disable $packages $optional >/dev/null 2>&1 || :
}

packages=$(missing | paste -s -d ' ' -)
[ -z "$packages" ] || fail "apt-get installed the packages, but they are still not found."
clean_up
trap - EXIT
compile_task
