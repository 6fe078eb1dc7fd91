#!/usr/bin/env bash
# Tests JAX's kernel calls against jaxlib's own encoder: jax_calls.sh VENV
#
# The encoder is in JAX's GPU plugin, which wants Python 3.12 and no GPU. Where there is no such
# Python this says so and is done: the other tests of the calls need no plugin.
set -euo pipefail
venv=$1
cd "$(dirname "$0")/.."
say() { printf 'jax calls: %s\n' "$*"; }

fits='import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 14))'
python=
for candidate in python3.12 python3.13 python3.14 python3 "$HOME"/.pyenv/versions/3.1[234]*/bin/python; do
  if "$candidate" -c "$fits" 2>/dev/null; then python=$candidate; break; fi
done
if [ -z "$python" ]; then say "no Python of 3.12 to 3.14 here: skipped"; exit 0; fi

if [ ! -e "$venv/.ready" ] || [ pyproject.toml -nt "$venv/.ready" ]; then
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv"
  install=("$venv/bin/python" tools/install.py "$venv")
  pins=$("$venv/bin/python" -c 'import tomllib
groups = tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]
wanted = ("pytest==", "hypothesis==", "numpy==", "triton==")
print(*(p.split(";")[0] for g in ("tools", "torch") for p in groups[g] if p.startswith(wanted)))')
  # shellcheck disable=SC2086
  "${install[@]}" --group jax $pins
  jax=$("$venv/bin/python" -c 'import jax; print(jax.__version__)')
  # Without what it depends on, which is CUDA.
  "${install[@]}" --no-deps "jax-cuda13-plugin==$jax"
  touch "$venv/.ready"
fi
JAX_PLATFORMS=cpu PYTHONPATH=src "$venv/bin/python" -m pytest tests/compile/test_jax_calls.py
