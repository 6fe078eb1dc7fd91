#!/usr/bin/env bash
# Makes the environment of what builds wheels and the site: release_tools.sh VENV PYTHON
set -euo pipefail
venv=$1 python=$2
cd "$(dirname "$0")/.."
if [ ! -e "$venv/.ready" ] || [ pyproject.toml -nt "$venv/.ready" ]; then
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv"
  pip=("$venv/bin/python" -m pip --disable-pip-version-check -q)
  "${pip[@]}" install --upgrade 'pip>=25.1'
  "${pip[@]}" install --group release
  touch "$venv/.ready"
fi
