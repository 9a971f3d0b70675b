# Shared by start.sh and stop.sh: where things are, and how to tell what runs.
# shellcheck shell=bash disable=SC2034

ALL_SERVICES=(postgres postgres18 rabbitmq kafka)

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
repo=$(cd "$here/../.." && pwd -P)
state=${IDEMPOTENCY_SERVICES_DIR:-$repo/.services}
env_file=$state/env
data=$state/data # a folder, or a link to one that the postgres user can reach
project=watermill-idempotency-$(printf %s "$state" | cksum | cut -d' ' -f1)

die() {
	printf '%s: %s\n' "$(basename "$0")" "$*" >&2
	exit 1
}

is_root() { [ "$(id -u)" = 0 ]; }

# as_owner NAME COMMAND... runs a command as the owner of a service's data:
# PostgreSQL refuses to run as root.
as_owner() {
	local name=$1
	shift
	case $name in
	postgres*) if is_root; then
		# From a folder that the other user may enter, and with no descriptor of ours but the standard three.
		(cd / && exec env -u LC_ALL -u LC_MESSAGES LANG=C.UTF-8 runuser -u postgres -- "$@" 7>&- 9>&-)
	else
		env -u LC_ALL -u LC_MESSAGES LANG=C.UTF-8 "$@" 7>&- 9>&-
	fi ;;
	*) "$@" ;;
	esac
}

# postgres_bin NAME prints the folder that has a server's initdb and pg_ctl.
postgres_bin() {
	if [ "$1" = postgres18 ]; then
		# Not through the link: the postgres user may be unable to follow it.
		local real
		real=$(readlink -f "$data/postgres18")/dist/bin
		[ -x "$real/pg_ctl" ] && printf '%s\n' "$real"
		return
	fi
	# A cluster stays with the major version that made it.
	local major=''
	[ -f "$data/postgres/major" ] && major=$(cat "$data/postgres/major")
	local dir
	for dir in "/usr/lib/postgresql/$major/bin" \
		$(printf '%s\n' /usr/lib/postgresql/*/bin | sort -V -r) \
		"$(pg_config --bindir 2>/dev/null || true)" "$(dirname "$(command -v initdb || echo /nowhere/initdb)")"; do
		[ -x "$dir/initdb" ] && [ -x "$dir/pg_ctl" ] && printf '%s\n' "$dir" && return
	done
	return 1
}

# pid_of NAME prints the process ID of a service that start.sh started and that
# still runs. A process that merely got the same number doesn't count: ours name
# our folder on their command line.
pid_of() {
	local name=$1 file pid dir command
	dir=$(readlink -f "$data/$name") || return 1
	file=$dir/pid
	[[ $name == postgres* ]] && file=$dir/cluster/postmaster.pid
	pid=$(head -n 1 "$file" 2>/dev/null) && [ -n "$pid" ] && [ -d "/proc/$pid" ] || return 1
	command=$(tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline") && [[ "$command " == *"$dir"[/\ ]* ]] || return 1
	printf '%s\n' "$pid"
}

port_of() { cat "$data/$1/port" 2>/dev/null; }

listens() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# The answers of the servers themselves, over their own protocols, through
# bash's /dev/tcp: a client program takes a second to start, these take none.

# talk PORT BYTES REQUEST (in printf's escapes) prints the answer as hex digits.
talk() {
	# shellcheck disable=SC2016
	timeout 3 bash -c '
		exec 3<>"/dev/tcp/127.0.0.1/$1" || exit 1
		printf "$3" >&3
		head -c "$2" <&3 | od -An -v -tx1 | tr -d " \n"' _ "$@" 2>/dev/null
}

answers() {
	local port got
	port=$(port_of "$1") || return 1
	case $1 in
	postgres*) # A start-up packet for the role: R asks for a password, E would say why not yet.
		[ "$(talk "$port" 1 '\0\0\0\032\0\003\0\0user\0idempotency\0\0')" = 52 ] ;;
	rabbitmq) # The protocol header: Connection.Start is method frame 1.
		[ "$(talk "$port" 1 'AMQP\0\0\011\001')" = 01 ] ;;
	kafka) # Metadata, version 1, no topic: length, correlation ID, number of brokers.
		got=$(talk "$port" 12 '\0\0\0\016\0\003\0\001\0\0\0\001\377\377\0\0\0\0')
		[ "${#got}" = 24 ] && [ "${got:16}" != 00000000 ] ;;
	esac
}

version_of() {
	case $1 in
	postgres*) "$(postgres_bin "$1")/postgres" --version | sed -E 's/[^0-9]*([0-9.]+).*/PostgreSQL \1/' ;;
	rabbitmq) printf 'RabbitMQ %s\n' "$(basename "$(printf '%s\n' /usr/lib/rabbitmq/lib/rabbitmq_server-* | sort -V | tail -n 1)" | sed 's/.*-//')" ;;
	kafka) printf 'Kafka %s\n' "$(kafka_version)" ;;
	esac
}

kafka_version() { sed -n '/kafka_2.13/{n;s/.*<version>\(.*\)<.*/\1/p}' "$here/pom.xml"; }

# use_docker tells whether compose.yml is to be used: a Docker engine answers, or SERVICES says so.
use_docker() {
	case ${SERVICES:-} in
	native) return 1 ;;
	docker) return 0 ;;
	'') ;;
	*) die "SERVICES=$SERVICES: use native or docker, or leave it empty" ;;
	esac
	command -v docker >/dev/null && timeout 10 docker info >/dev/null 2>&1 && docker compose version >/dev/null 2>&1
}

compose() { docker compose -p "$project" -f "$here/compose.yml" "$@"; }
