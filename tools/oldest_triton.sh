#!/usr/bin/env bash
# Compiles kernels with the oldest Triton that is supported: oldest_triton.sh VENV [ARGS for pytest]
#
# Its wheel lies beside VENV, whose other packages serve it.
set -euo pipefail
venv=$1; shift
cd "$(dirname "$0")/.."
say() { printf 'oldest Triton: %s\n' "$*"; }

if [ "$(uname -sm)" != "Linux x86_64" ]; then say "no wheel for $(uname -sm): skipped"; exit 0; fi

folder=$venv-oldest-triton
if [ ! -e "$folder/.ready" ] || [ pyproject.toml -nt "$folder/.ready" ]; then
  version=$("$venv/bin/python" -c 'import re, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
wanted = project["optional-dependencies"]["cuda"]
print(*re.findall(r"^triton>=([\d.]+)", "\n".join(wanted), re.M))')
  rm -rf "$folder"
  "$venv/bin/python" tools/install.py "$venv" --no-deps --target "$folder" "triton==$version"
  touch "$folder/.ready"
fi
say "$(PYTHONPATH=$folder "$venv/bin/python" -c 'import triton; print(triton.__version__)')"
PYTHONPATH=$folder:src "$venv/bin/python" -m pytest -m oldest_triton tests/compile "$@"
