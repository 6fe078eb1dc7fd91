#!/usr/bin/env bash
# Writes the tree that the `kernels` library loads heedful from, and loads it: hub.sh VENV FOLDER
#
# The library lies beside VENV, whose other packages serve it.
set -euo pipefail
venv=$1 folder=$2
cd "$(dirname "$0")/.."
say() { printf 'hub: %s\n' "$*"; }

packages=$venv-hub
if [ ! -e "$packages/.ready" ] || [ tools/hub.sh -nt "$packages/.ready" ]; then
  rm -rf "$packages"
  "$venv/bin/python" -m pip --disable-pip-version-check -q install \
    --target "$packages" kernels==0.17.0
  touch "$packages/.ready"
fi
say "$(PYTHONPATH=src "$venv/bin/python" tools/hub_tree.py "$folder")"
PYTHONPATH=src:$packages "$venv/bin/python" -m pytest -rs tests/cpu/commands/test_hub_tree.py
