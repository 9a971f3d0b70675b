#!/usr/bin/env bash
# Stops the servers that start.sh started:
#
#	integration/services/stop.sh [--kill | --purge] [postgres] [postgres18] [rabbitmq] [kafka]
#
# --kill stops them as a crash would (SIGKILL); start.sh brings them back.
# --purge removes their data as well. The downloads in the cache stay.
set -euo pipefail

# shellcheck source=SCRIPTDIR/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

mode="stop"
wanted=()
for argument in "$@"; do
	case $argument in
	--kill) mode="kill" ;;
	--purge) mode="purge" ;;
	-*) die "unknown option $argument: use --kill or --purge" ;;
	*)
		[[ " ${ALL_SERVICES[*]} " == *" $argument "* ]] || die "unknown service $argument: use ${ALL_SERVICES[*]}"
		wanted+=("$argument")
		;;
	esac
done
all=''
[ "${#wanted[@]}" != 0 ] || { all=1 && wanted=("${ALL_SERVICES[@]}"); }

[ -d "$state" ] || exit 0
if command -v flock >/dev/null; then
	exec 9>"$state/lock"
	flock -w 600 9 || die "a start.sh has held $state/lock for 10 minutes"
fi

# stop_native NAME ends one server, and by force if it does not end in time.
stop_native() {
	local name=$1 pid deadline=$((SECONDS + 20))
	pid=$(pid_of "$name") || return 0
	case $mode-$name in
	kill-* | purge-*) kill -KILL "$pid" ;;
	*-postgres*) kill -INT "$pid" ;; # fast: sessions end, a checkpoint is made
	*) kill -TERM "$pid" ;;
	esac
	while pid_of "$name" >/dev/null; do
		[ "$SECONDS" -lt "$deadline" ] || { kill -KILL "$pid" 2>/dev/null || true; }
		[ "$SECONDS" -lt $((deadline + 5)) ] || die "$name (process $pid) does not end"
		sleep 0.05
	done
	rm -f "$data/$name/pid"
	echo "$name stopped"
}

if [ "$(cat "$state/kind" 2>/dev/null)" = docker ]; then
	case $mode in
	kill) compose kill "${wanted[@]}" ;;
	stop) compose stop "${wanted[@]}" ;;
	purge) if [ -n "$all" ]; then compose down --volumes; else compose rm --stop --force --volumes "${wanted[@]}"; fi ;;
	esac
else
	pids=()
	for name in "${wanted[@]}"; do
		stop_native "$name" &
		pids+=($!)
	done
	for pid in "${pids[@]}"; do
		wait "$pid"
	done
fi

if [ "$mode" = purge ] && [ -d "$data" ]; then
	real=$(readlink -f "$data")
	for name in "${wanted[@]}"; do
		rm -rf "${real:?}/$name"
	done
fi
if [ "$mode" = purge ] && [ -n "$all" ]; then
	[ ! -d "$data" ] || rm -rf "${real:?}"
	# Whatever else is in the folder is not ours to remove.
	rm -rf "$data" "$env_file" "$state"/env.* "$state/kind" "$state/apt.log" "$state/lock"
	rmdir "$state" 2>/dev/null || true
fi
