#!/bin/sh
# Writes a file, named by $1, with a random value for each secret of compose.yaml. An existing file stays
# unchanged: Postgres keeps the password that its volume was created with.
set -eu

[ ! -e "$1" ] || exit 0

secret() {
	# Hex, so that it needs no encoding in DATABASE_URL.
	od -An -N32 -tx1 /dev/urandom | tr -d ' \n'
}

umask 077
cat >"$1" <<VALUES
POSTGRES_PASSWORD=$(secret)
STAMPEDE_ADMIN_TOKEN=$(secret)
STAMPEDE_JWT_SECRET=$(secret)
VALUES
echo "secrets: wrote new ones to $1"
