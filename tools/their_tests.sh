#!/usr/bin/env bash
# Runs transformers' own tests of attention with ours: their_tests.sh VENV [pytest's arguments]
#
# They are in the sdist of the version that VENV has, which is fetched once.
set -euo pipefail
venv=$1
shift
cd "$(dirname "$0")/.."
python=$venv/bin/python
version=$("$python" -c 'import transformers; print(transformers.__version__)')
folder=$venv/their-tests
if [ ! -d "$folder/transformers-$version" ]; then
  "$python" -m pip download -q --no-deps --no-binary :all: -d "$folder" "transformers==$version"
  tar xzf "$folder/transformers-$version.tar.gz" -C "$folder"
fi
TRANSFORMERS_TESTS=$PWD/$folder/transformers-$version PYTHONPATH=src "$python" -m pytest \
  tests/integrations/transformers/test_their_tests.py "$@"
