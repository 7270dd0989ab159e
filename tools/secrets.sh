#!/bin/sh
# Writes the file named by $1 with a new random value for each secret that compose.yaml asks for. A file
# that is there stays as it is: Postgres keeps the password that its volume was created with.
set -eu

[ ! -e "$1" ] || exit 0

secret() {
	# Hex, so that it stands in DATABASE_URL as it is.
	od -An -N32 -tx1 /dev/urandom | tr -d ' \n'
}

umask 077
cat >"$1" <<VALUES
POSTGRES_PASSWORD=$(secret)
STAMPEDE_ADMIN_TOKEN=$(secret)
STAMPEDE_JWT_SECRET=$(secret)
VALUES
echo "secrets: wrote new ones to $1"
