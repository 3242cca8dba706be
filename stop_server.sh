#!/usr/bin/env bash
# Stops the server that start_server.sh started: requests in flight are finished first, within its drain timeout.
# Returns 0 once it is gone, also where none ran; 1 where it had to be killed.
#
#   ./stop_server.sh [PORT]      8080 unless given. From the environment: STOP_TIMEOUT (seconds, 60), RUN_DIR (.work)
set -u
cd "$(dirname "$0")" || exit 1

port=${1:-8080}
pid_file=${RUN_DIR:-.work}/server-$port.pid
if [[ ! -f $pid_file ]]; then
    echo "no server was started here on port $port"
    exit 0
fi
pid=$(<"$pid_file")
kill -TERM "$pid" 2>/dev/null
deadline=$((SECONDS + ${STOP_TIMEOUT:-60}))
while kill -0 "$pid" 2>/dev/null; do
    if ((SECONDS >= deadline)); then
        kill -KILL "$pid"
        rm -f "$pid_file"
        echo "stop_server.sh: process $pid did not end within ${STOP_TIMEOUT:-60} s and was killed" >&2
        exit 1
    fi
    sleep 0.1
done
rm -f "$pid_file"
echo "stopped the server on port $port"
