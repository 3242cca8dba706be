#!/usr/bin/env bash
# Starts the server in the background, returns 0 once it answers and leaves it running.
# Otherwise it says why, stops what it started and returns 1.
#
#   ./start_server.sh [PORT] [FLAG ...]      PORT is 8080 unless given; flags are those of python -m qwen_serve.server
#
# Thinking is off, temperature is 0 where a request gives none, and 64 requests run at once, unless flags say
# otherwise. From the environment: MODEL (a GGUF or a folder with one; models/nano-Q4_K_M.gguf), HOST (0.0.0.0),
# START_TIMEOUT (seconds, 900), PYTHON (.venv/bin/python), RUN_DIR (.work: process id and log).
set -u
cd "$(dirname "$0")" || exit 1

port=8080
if [[ ${1:-} =~ ^[0-9]+$ ]]; then
    port=$1
    shift
fi
python=${PYTHON:-.venv/bin/python}
model=${MODEL:-models/nano-Q4_K_M.gguf}
run_dir=${RUN_DIR:-.work}
pid_file=$run_dir/server-$port.pid
log=$run_dir/server-$port.log

fail() {
    echo "start_server.sh: $*" >&2
    exit 1
}

answers() { # the status of /health is 200
    "$python" -c 'import sys, urllib.request as u; u.build_opener(u.ProxyHandler({})).open(sys.argv[1], timeout=5)' \
        "http://127.0.0.1:$port/health" 2>/dev/null
}

command -v "$python" >/dev/null || fail "$python is not there: run make setup, or set PYTHON"
mkdir -p "$run_dir" || fail "$run_dir cannot be made"
if [[ -f $pid_file ]] && kill -0 "$(<"$pid_file")" 2>/dev/null; then
    fail "a server started here still runs on port $port (process $(<"$pid_file")); ./stop_server.sh $port ends it"
fi
if "$python" -c 'import socket, sys; socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5)' "$port" 2>/dev/null; then
    fail "port $port is taken by another program"
fi

setsid nohup "$python" -m qwen_serve.server --model "$model" --host "${HOST:-0.0.0.0}" --port "$port" \
    --greedy --parallel 64 "$@" >"$log" 2>&1 </dev/null &
pid=$!
echo "$pid" >"$pid_file"

deadline=$((SECONDS + ${START_TIMEOUT:-900}))
until answers; do
    if ! kill -0 "$pid" 2>/dev/null; then
        rm -f "$pid_file"
        tail -n 20 "$log" >&2
        fail "the server ended before it answered; its log is $log"
    fi
    if ((SECONDS >= deadline)); then
        kill -KILL "$pid"
        rm -f "$pid_file"
        tail -n 20 "$log" >&2
        fail "no answer within ${START_TIMEOUT:-900} s; its log is $log"
    fi
    sleep 0.2
done
echo "serving $model on port $port (process $pid, log $log)"
