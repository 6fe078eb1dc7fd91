#!/usr/bin/env bash
# Runs a command whose output may be held back, and says every 20 s that it runs: ticks.sh WORDS COMMAND...
set -euo pipefail
words=$1; shift
start=$SECONDS
say() { printf '%s: %s\n' "$words" "$*"; }
say "begun"
(while sleep "${TICK:-20}"; do say "$((SECONDS - start)) s"; done) &
ticker=$!
trap 'kill "$ticker" 2>/dev/null || true; wait "$ticker" 2>/dev/null || true' EXIT
"$@"
