#!/usr/bin/env bash
# Starts the servers that the tests use, waits until they answer, and writes
# their addresses to .services/env:
#
#	integration/services/start.sh [postgres] [postgres18] [rabbitmq] [kafka]
#
# Without a name it starts all four. What runs already is left alone, so a
# second call costs nothing and a call after a crash restarts what crashed.
# stop.sh stops them. Nothing but these instances is touched: they have data
# folders, ports and a node name of their own. (Debian's packages may start
# default servers when they are installed; those are left alone.)
#
# Where a Docker engine answers, the servers come from compose.yml. Elsewhere
# (Linux, amd64 or arm64) they run as plain processes: PostgreSQL and RabbitMQ
# from Debian's packages, the newest PostgreSQL and Kafka from Maven Central.
# Missing packages are installed if the caller is root. Downloads are kept in
# ~/.cache/watermill-idempotency, so later starts need no network.
#
# Variables, all optional:
#
#	SERVICES                       native or docker, instead of looking for an engine
#	IDEMPOTENCY_SERVICES_DIR       the state folder (default: .services)
#	IDEMPOTENCY_POSTGRES_PORT      default 25432  (the next free one if taken)
#	IDEMPOTENCY_POSTGRES18_PORT    default 25433
#	IDEMPOTENCY_AMQP_PORT          default 26672
#	IDEMPOTENCY_KAFKA_PORT         default 29092
#	IDEMPOTENCY_POSTGRES_URL, IDEMPOTENCY_POSTGRES18_URL, IDEMPOTENCY_AMQP_URL,
#	IDEMPOTENCY_KAFKA_BROKERS      a server of your own: it is used, and none is started
set -euo pipefail
umask 022

# shellcheck source=SCRIPTDIR/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

WAIT_SECONDS=90

now() { printf '%s\n' "${EPOCHREALTIME/[.,]/}"; }
since() { printf '%s\n' "$((($(now) - $1) / 100000))" | sed -E 's/^(.)$/0\1/; s/(.)$/.\1/'; }

variable_of() {
	case $1 in
	postgres) echo IDEMPOTENCY_POSTGRES_URL ;;
	postgres18) echo IDEMPOTENCY_POSTGRES18_URL ;;
	rabbitmq) echo IDEMPOTENCY_AMQP_URL ;;
	kafka) echo IDEMPOTENCY_KAFKA_BROKERS ;;
	esac
}

# address_of NAME PORT prints the value of a service's variable.
address_of() {
	case $1 in
	postgres*) echo "postgres://idempotency:idempotency@127.0.0.1:$2/idempotency?sslmode=disable" ;;
	rabbitmq) echo "amqp://guest:guest@127.0.0.1:$2/" ;;
	kafka) echo "127.0.0.1:$2" ;;
	esac
}

port_variable_of() {
	case $1 in
	postgres) echo IDEMPOTENCY_POSTGRES_PORT ;;
	postgres18) echo IDEMPOTENCY_POSTGRES18_PORT ;;
	rabbitmq) echo IDEMPOTENCY_AMQP_PORT ;;
	kafka) echo IDEMPOTENCY_KAFKA_PORT ;;
	esac
}

default_port_of() {
	case $1 in
	postgres) echo 25432 ;;
	postgres18) echo 25433 ;;
	rabbitmq) echo 26672 ;;
	kafka) echo 29092 ;;
	esac
}

# foreign NAME tells whether the caller named a server of their own. A value
# that start.sh once wrote to the env file, or of compose.yml's ports, is not
# foreign.
foreign() {
	local variable value
	variable=$(variable_of "$1")
	value=${!variable:-}
	[ -n "$value" ] || return 1
	[ "$value" = "$(address_of "$1" "$(default_port_of "$1")")" ] && return 1
	! grep -qxF "export $variable='$value'" "$env_file" "$state/env.before" 2>/dev/null
}

# reachable NAME checks that something listens where the caller's variable says.
reachable() {
	local variable place
	variable=$(variable_of "$1")
	# user:password@host:port/path?query, or host:port,host:port
	place=$(printf %s "${!variable}" | sed -E 's#^[a-z+]+://##; s#^[^@/]*@##; s#[/?,].*##')
	[[ $place =~ ^(.+):([0-9]+)$ ]] || return 0
	# shellcheck disable=SC2016
	timeout 5 bash -c 'exec 3<>"/dev/tcp/$1/$2"' _ "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}" 2>/dev/null ||
		die "$variable is set, but nothing listens on $place. Unset it, and a server is started here."
}

# free NAME PORT: nothing listens there, and it is not of a server of another
# folder that is down for a moment. Kafka and RabbitMQ use the port above theirs
# as well.
free() {
	local owner
	owner=$(cat "$cache/ports/$2" 2>/dev/null) || owner=$state
	[ "$owner" = "$state" ] || [ ! -d "$owner/data" ] || return 1
	listens "$2" && return 1
	case $1 in rabbitmq | kafka) ! listens $(($2 + 1)) ;; esac
}

# take PORT notes whose it is, and prints it.
take() {
	mkdir -p "$cache/ports"
	echo "$state" >"$cache/ports/$1"
	echo "$1"
}

# pick_port NAME takes the port asked for, or keeps the one of the last start, or
# takes the default one, or the next free one.
pick_port() {
	local name=$1 variable asked port step
	variable=$(port_variable_of "$name")
	asked=${!variable:-}
	port=${asked:-$(port_of "$name")} || port=''
	if [ -n "$port" ]; then
		# Clients know it, and the system may still be at clearing away the old server.
		for _ in {1..100}; do
			free "$name" "$port" && take "$port" && return
			sleep 0.1
		done
		[ -z "$asked" ] || die "$variable=$asked: the port is taken"
	fi
	for step in {0..39}; do
		port=$(($(default_port_of "$name") + 10 * step))
		free "$name" "$port" && take "$port" && return
	done
	die "no free port for $name: set $variable"
}

# ---------------------------------------------------------------- packages

java_bin() {
	local java major
	for java in "${JAVA_HOME:-/nowhere}/bin/java" "$(command -v java || true)" /usr/lib/jvm/*/bin/java; do
		[ -x "$java" ] || continue
		major=$("$java" -version 2>&1 | sed -nE '1,3s/.*version "([0-9]+).*/\1/p' | head -n 1)
		[ "${major:-0}" -ge 17 ] && printf '%s\n' "$java" && return
	done
	return 1
}

have_german() { [[ $(locale -a 2>/dev/null) == *de_DE.utf8* ]]; }

# install_packages NAME... installs what the services need and the machine lacks.
install_packages() {
	local name missing=() java=''
	for name in "$@"; do
		case $name in
		postgres)
			postgres_bin postgres >/dev/null || missing+=(postgresql)
			# A server that speaks another language: errors must be told by their codes.
			is_root && ! have_german && [ ! -e /usr/share/i18n/locales/de_DE ] && missing+=(locales)
			;;
		postgres18)
			is_root && ! id postgres >/dev/null 2>&1 && missing+=(postgresql)
			[ -x "$data/postgres18/dist/bin/pg_ctl" ] && continue
			command -v unzip >/dev/null || missing+=(unzip)
			command -v xz >/dev/null || missing+=(xz-utils)
			;;
		rabbitmq) [ -x /usr/lib/rabbitmq/bin/rabbitmq-server ] || missing+=(rabbitmq-server) ;;
		kafka) java_bin >/dev/null || java=1 ;;
		esac
		case $name in
		postgres18 | kafka) [ -d "$jars" ] || command -v mvn >/dev/null || missing+=(maven) ;;
		esac
	done
	if [ "${#missing[@]}" != 0 ] || [ -n "$java" ]; then
		mapfile -t missing < <(printf '%s\n' ${missing[@]+"${missing[@]}"} | sed '/^$/d' | sort -u)
		local what="${missing[*]}${java:+ openjdk-17-jre-headless (or newer)}"
		is_root || die "missing packages: ${what# }. Install them, or start a Docker engine and run this again, or run: docker compose -f integration/services/compose.yml up -d --wait"
		command -v apt-get >/dev/null || die "missing: ${what# }, and this machine has no apt-get. Use a Docker engine."
		export DEBIAN_FRONTEND=noninteractive
		echo "installing ${what# }"
		apt-get update -qq >"$state/apt.log" 2>&1 || { tail -n 20 "$state/apt.log" >&2 && die 'apt-get update failed'; }
		if [ -n "$java" ]; then
			for java in openjdk-21-jre-headless openjdk-17-jre-headless openjdk-25-jre-headless ''; do
				[ -n "$java" ] || die 'this release has no Java 17 or newer, which Kafka needs'
				[[ $(apt-cache policy "$java") == *'Candidate: '[0-9]* ]] && missing+=("$java") && break
			done
		fi
		apt-get install -y -qq --no-install-recommends "${missing[@]}" >>"$state/apt.log" 2>&1 9>&- ||
			{ tail -n 20 "$state/apt.log" >&2 && die "apt-get install ${missing[*]} failed"; }
	fi
	# Before PostgreSQL starts: a running server doesn't see a new locale everywhere.
	if is_root && [[ " $* " == *' postgres '* ]] && ! have_german && command -v localedef >/dev/null; then
		localedef -i de_DE -f UTF-8 de_DE.UTF-8 || echo 'no German locale: the test of a translated server is skipped' >&2
	fi
}

# fetch_jars copies what pom.xml names into the cache, once.
fetch_jars() {
	[ -d "$jars" ] && return
	mkdir -p "$cache"
	(
		flock 8
		[ -d "$jars" ] && exit
		tmp=$(mktemp -d "$cache/tmp.XXXXXX")
		trap 'rm -rf "$tmp"' EXIT
		arch=amd64
		case $(uname -m) in aarch64 | arm64) arch=arm64v8 ;; esac
		mvn -B -q -f "$here/pom.xml" "-Dpostgres.arch=$arch" dependency:copy-dependencies \
			"-DoutputDirectory=$tmp" -DincludeScope=runtime </dev/null >"$cache/mvn.log" 2>&1 7>&- 8>&- 9>&- ||
			{ tail -n 20 "$cache/mvn.log" >&2 && die 'the download from Maven Central failed'; }
		mkdir "$tmp/postgres"
		mv "$tmp"/embedded-postgres-binaries-*.jar "$tmp/postgres/"
		mkdir -p "$cache"
		mv "$tmp" "$jars"
		chmod 755 "$jars"
		trap - EXIT
	) 8>"$cache/lock"
}

# ---------------------------------------------------------------- services

# await NAME LOG waits until a service answers, or shows why it doesn't.
await() {
	local deadline=$((SECONDS + WAIT_SECONDS))
	until answers "$1"; do
		if ! pid_of "$1" >/dev/null; then
			sleep 0.5 # it may be writing its process ID
			pid_of "$1" >/dev/null || { tail -n 30 "$2" >&2 && die "$1 ended; the end of $2 is above"; }
		fi
		[ "$SECONDS" -lt "$deadline" ] || { tail -n 30 "$2" >&2 && die "$1 did not answer in $WAIT_SECONDS s; the end of $2 is above"; }
		sleep 0.1
	done
}

start_postgres() {
	local name=$1 dir=$data/$1 bin port real
	if [ "$name" = postgres18 ] && [ ! -x "$dir/dist/bin/pg_ctl" ]; then
		fetch_jars
		local tmp
		tmp=$(mktemp -d "$dir/dist.XXXXXX")
		unzip -q -o "$jars"/postgres/*.jar '*.txz' -d "$tmp"
		tar -xJf "$tmp"/*.txz -C "$tmp"
		rm "$tmp"/*.txz
		chmod 755 "$tmp"
		mv "$tmp" "$dir/dist"
	fi
	bin=$(postgres_bin "$name") || die "no initdb for $name"
	real=$(readlink -f "$dir")
	is_root && chown postgres "$real"
	if [ ! -f "$real/cluster/PG_VERSION" ] || [ ! -f "$real/ready" ]; then
		rm -rf "$real/cluster"
		echo idempotency >"$real/password"
		as_owner "$name" "$bin/initdb" -D "$real/cluster" -U idempotency -E UTF8 --locale=C.UTF-8 \
			--auth=scram-sha-256 --pwfile="$real/password" </dev/null >"$real/initdb.log" 2>&1 ||
			{ tail -n 20 "$real/initdb.log" >&2 && die "initdb failed for $name"; }
		# fsync and synchronous_commit stay on, as in production.
		as_owner "$name" tee -a "$real/cluster/postgresql.conf" >/dev/null <<-'EOF'
			listen_addresses = '127.0.0.1'
			unix_socket_directories = ''
			max_connections = 300
			log_line_prefix = '%m [%p] %a '
		EOF
		echo 'CREATE DATABASE idempotency' |
			as_owner "$name" "$bin/postgres" --single -D "$real/cluster" postgres >>"$real/initdb.log" 2>&1
		cut -d. -f1 <"$real/cluster/PG_VERSION" >"$real/major"
		touch "$real/ready"
	fi
	port=$(pick_port "$name")
	echo "$port" >"$real/port"
	# Another try or two: after a SIGKILL the orphans of the old server hold its memory for a moment.
	local try
	for try in 1 2 3 4; do
		as_owner "$name" "$bin/pg_ctl" start -w -t "$WAIT_SECONDS" -D "$real/cluster" -l "$real/log" -o "-p $port" </dev/null >"$real/pg_ctl.log" 2>&1 && break
		[ "$try" != 4 ] || break # await tells
		sleep 1
	done
	await "$name" "$real/log"
}

start_rabbitmq() {
	local dir port
	dir=$(readlink -f "$data/rabbitmq")
	port=$(pick_port rabbitmq)
	echo "$port" >"$dir/port"
	mkdir -p "$dir/mnesia" "$dir/log"
	: >"$dir/rabbitmq.conf"
	echo '[].' >"$dir/enabled_plugins"
	# A wrapper for the tools: "rabbitmqctl list_queues" of this node, "rabbitmq-server" of this node.
	# RUNNING_UNDER_SYSTEMD only says that the shell is to become the server instead of waiting for it.
	cat >"$dir/run" <<-EOF
		#!/bin/sh
		# run TOOL ARGUMENT... runs one of RabbitMQ's tools for this node.
		export HOME='$dir' RABBITMQ_NODENAME='$project@localhost'
		export RABBITMQ_NODE_IP_ADDRESS=127.0.0.1 RABBITMQ_NODE_PORT=$port RABBITMQ_DIST_PORT=$((port + 1))
		export RABBITMQ_CONF_ENV_FILE='$dir/none' RABBITMQ_CONFIG_FILE='$dir/rabbitmq.conf' RABBITMQ_ADVANCED_CONFIG_FILE='$dir/none.config'
		export RABBITMQ_ENABLED_PLUGINS_FILE='$dir/enabled_plugins' RABBITMQ_MNESIA_BASE='$dir/mnesia' RABBITMQ_LOG_BASE='$dir/log'
		export RABBITMQ_PID_FILE='$dir/pid' RUNNING_UNDER_SYSTEMD=1 ERL_EPMD_ADDRESS=127.0.0.1
		export RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS='-kernel inet_dist_use_interface {127,0,0,1} +sbwt none +sbwtdcpu none +sbwtdio none'
		tool=\$1
		shift
		exec "/usr/lib/rabbitmq/bin/\$tool" "\$@"
	EOF
	chmod 755 "$dir/run"
	(cd "$dir" && exec setsid "$dir/run" rabbitmq-server </dev/null >"$dir/console.log" 2>&1 7>&- 9>&-) &
	echo $! >"$dir/pid"
	disown
	await rabbitmq "$dir/console.log"
}

start_kafka() {
	local dir port java
	fetch_jars
	dir=$(readlink -f "$data/kafka")
	java=$(java_bin) || die 'Kafka needs Java 17 or newer'
	port=$(pick_port kafka)
	echo "$port" >"$dir/port"
	cat >"$dir/server.properties" <<-EOF
		process.roles=broker,controller
		node.id=1
		controller.quorum.voters=1@127.0.0.1:$((port + 1))
		listeners=PLAINTEXT://127.0.0.1:$port,CONTROLLER://127.0.0.1:$((port + 1))
		advertised.listeners=PLAINTEXT://127.0.0.1:$port
		controller.listener.names=CONTROLLER
		listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
		log.dirs=$dir/logs
		num.partitions=12
		offsets.topic.replication.factor=1
		offsets.topic.num.partitions=4
		transaction.state.log.replication.factor=1
		transaction.state.log.min.isr=1
		group.initial.rebalance.delay.ms=0
		group.min.session.timeout.ms=1000
	EOF
	if [ ! -f "$dir/logs/meta.properties" ]; then
		"$java" -cp "$jars/*" kafka.tools.StorageTool format \
			-t "$(head -c 16 /dev/urandom | base64 | tr '+/' 'aa' | tr -d =)" -c "$dir/server.properties" \
			</dev/null >"$dir/format.log" 2>&1 || { tail -n 20 "$dir/format.log" >&2 && die 'formatting the folder of Kafka failed'; }
	fi
	(cd "$dir" && exec setsid "$java" -Xmx512m -XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Dorg.slf4j.simpleLogger.defaultLogLevel=warn \
		-Dorg.slf4j.simpleLogger.showDateTime=true '-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd HH:mm:ss.SSS' \
		-cp "$jars/*" kafka.Kafka "$dir/server.properties" </dev/null >"$dir/log" 2>&1 7>&- 9>&-) &
	echo $! >"$dir/pid"
	disown
	await kafka "$dir/log"
}

# start_one NAME does what is left to do for one service and prints its line.
start_one() {
	local begun note=started
	begun=$(now)
	mkdir -p "$data/$1"
	if pid_of "$1" >/dev/null && answers "$1"; then
		note=running
	elif pid_of "$1" >/dev/null && [ -n "$(port_of "$1")" ]; then
		await "$1" "$data/$1/log"
	else
		case $1 in
		postgres*) start_postgres "$1" ;;
		*) "start_$1" ;;
		esac
	fi
	report "$1" "$(version_of "$1")" "127.0.0.1:$(port_of "$1")" "$(since "$begun") s" "$note"
}

report() { printf '%-11s %-18s %-16s %7s  %s\n' "$@"; }

start_native() {
	[ "$(uname -s)" = Linux ] || die 'without a Docker engine the servers run on Linux only'
	command -v flock >/dev/null || die 'flock is missing (package util-linux)'
	local name needed=()
	for name in "$@"; do
		pid_of "$name" >/dev/null || needed+=("$name")
	done
	[ "${#needed[@]}" = 0 ] || install_packages "${needed[@]}"
	make_data

	# The servers of two folders that start at once would pick the same ports.
	mkdir -p "$cache"
	exec 7>"$cache/ports.lock"
	flock -w 600 7 || die "another start.sh has held $cache/ports.lock for 10 minutes"

	# In parallel; each one's line when it is up.
	local pids=() failed=0 pid
	for name in "$@"; do
		start_one "$name" &
		pids+=($!)
	done
	for pid in "${pids[@]}"; do
		wait "$pid" || failed=1
	done
	[ "$failed" = 0 ] || die 'not all services are up'
}

# make_data makes the folder of the data. The user postgres must reach it, which
# it can't below a home folder that is closed to others.
make_data() {
	[ -d "$data" ] && return
	rm -f "$data"
	if is_root && id postgres >/dev/null 2>&1 && ! (cd / && runuser -u postgres -- test -x "$state"); then
		local elsewhere
		elsewhere=$(mktemp -d /var/tmp/watermill-idempotency.XXXXXX)
		chmod 755 "$elsewhere"
		ln -s "$elsewhere" "$data"
	else
		mkdir "$data"
	fi
}

start_docker() {
	local name variable port begun
	begun=$(now)
	mkdir -p "$data"
	for name in "$@"; do
		mkdir -p "$data/$name"
		if [ -z "$(compose ps -q --status running "$name" 2>/dev/null)" ] || [ -z "$(port_of "$name")" ]; then
			port=$(pick_port "$name")
			echo "$port" >"$data/$name/port"
		fi
	done
	for name in "${ALL_SERVICES[@]}"; do
		port=$(port_of "$name") || port=''
		variable=$(port_variable_of "$name")
		export "$variable=${port:-$(default_port_of "$name")}"
	done
	compose up -d --wait --wait-timeout 300 "$@" 9>&- || { compose logs --tail 30 >&2 && die 'not all services are up'; }
	for name in "$@"; do
		report "$name" "$(compose images --format json "$name" 2>/dev/null | sed -nE 's/.*"Tag":"([^"]*)".*/\1/p' | head -n 1)" \
			"127.0.0.1:$(port_of "$name")" "$(since "$begun") s" docker
	done
}

# ---------------------------------------------------------------- main

wanted=()
for name in "$@"; do
	[[ " ${ALL_SERVICES[*]} " == *" $name "* ]] || die "unknown service $name: use ${ALL_SERVICES[*]}"
	wanted+=("$name")
done
[ "${#wanted[@]}" != 0 ] || wanted=("${ALL_SERVICES[@]}")

cache=${XDG_CACHE_HOME:-${HOME:-/var/tmp}/.cache}/watermill-idempotency
jars=$cache/jars-$(uname -m)-$(cksum <"$here/pom.xml" | cut -d' ' -f1)

mkdir -p "$state"
if command -v flock >/dev/null; then
	# One start at a time; the second finds everything up. The servers don't inherit the lock.
	exec 9>"$state/lock"
	flock -w 600 9 || die "another start.sh has held $state/lock for 10 minutes"
fi

ours=()
theirs=()
for name in "${ALL_SERVICES[@]}"; do
	if foreign "$name"; then
		reachable "$name"
		theirs+=("$name")
	elif [[ " ${wanted[*]} " == *" $name "* ]]; then
		ours+=("$name")
	fi
done

if [ "${#ours[@]}" != 0 ]; then
	if use_docker; then
		echo docker >"$state/kind"
		start_docker "${ours[@]}"
	else
		echo native >"$state/kind"
		start_native "${ours[@]}"
	fi
fi

# Addresses that changed are remembered, so that a shell that read the old file
# isn't taken for one with servers of its own.
if [ -f "$env_file" ]; then
	touch "$state/env.before"
	sort -u -o "$state/env.before" "$env_file" "$state/env.before"
fi
{
	echo '# Written by integration/services/start.sh.'
	for name in "${ALL_SERVICES[@]}"; do
		variable=$(variable_of "$name")
		if [[ " ${theirs[*]:-} " == *" $name "* ]]; then
			printf "export %s='%s' # your own\n" "$variable" "${!variable}"
		elif port=$(port_of "$name"); then
			printf "export %s='%s'\n" "$variable" "$(address_of "$name" "$port")"
		fi
	done
} >"$env_file.new"
mv "$env_file.new" "$env_file"

for name in ${theirs[@]+"${theirs[@]}"}; do
	report "$name" 'your own' "see $(variable_of "$name")" '' ''
done
