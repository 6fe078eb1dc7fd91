#!/usr/bin/env bash
# Runs what compiles kernels through workers of each Triton that is supported: compilers.sh VENV
#
# The toolchains lie beside VENV; one that cannot be had is said to be skipped.
set -euo pipefail
venv=$1
shift
cd "$(dirname "$0")/.."
say() { printf 'compilers: %s\n' "$*"; }
heedful() { PYTHONPATH=src "$venv/bin/python" -m heedful.cli "$@"; }

if [ "$(uname -sm)" != "Linux x86_64" ]; then say "no wheels for $(uname -sm): skipped"; exit 0; fi

export XDG_DATA_HOME=$PWD/$venv-toolchains
failed=()
for version in 3.6.0 3.7.1 3.8.0 3.9.0; do
  if ! heedful toolchain path "$version" >/dev/null 2>&1 && ! heedful toolchain install "$version"; then
    say "Triton $version is skipped: it could not be installed"
    continue
  fi
  folder=$(heedful toolchain path "$version")
  say "Triton $version"
  picked=()
  if [ "$version" != 3.9.0 ]; then
    say "of it the tests of every Triton: the others plan kernels that need 3.9"
    picked=(-m "oldest_triton or every_triton")
  fi
  HEEDFUL_TRITON=$folder PYTHONPATH=src "$venv/bin/python" -m pytest -rs \
    tests/compile tests/emulated/kernels "${picked[@]}" "$@" || failed+=("$version")
done
if [ ${#failed[@]} -gt 0 ]; then say "failed: ${failed[*]}"; exit 1; fi
