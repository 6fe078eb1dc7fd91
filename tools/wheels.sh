#!/usr/bin/env bash
# Builds sdist and wheel, the same bytes from the same commit: wheels.sh VENV FOLDER
#
# Files have the time of the commit, or SOURCE_DATE_EPOCH (seconds) if that is set.
set -euo pipefail
venv=$1 folder=$2
cd "$(dirname "$0")/.."
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH
umask 022
rm -rf "$folder"
"$venv/bin/python" -m build --no-isolation --outdir "$folder" . >/dev/null
"$venv/bin/python" -m twine check --strict "$folder"/*
(cd "$folder" && sha256sum -- * 2>/dev/null || shasum -a 256 -- *)
