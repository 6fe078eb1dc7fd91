#!/usr/bin/env bash
# Builds the developer's environment: set-up.sh VENV PYTHON
#
# - PYTHON's own torch sees a GPU: it is kept (the environment shares PYTHON's packages), with its
#   Triton; only tools are installed.
# - An NVIDIA GPU and no such torch: torch's CUDA wheel, with the Triton that it names.
# - An AMD GPU and no such torch: a ROCm torch has to be there first, since its index depends on
#   the ROCm release; this script says so and stops.
# - No GPU: torch's CPU wheel, and on Linux x86-64 a Triton that compiles for other machines' GPUs.
set -euo pipefail
venv=$1 python=$2
cd "$(dirname "$0")/.."
# PyTorch's CPU wheels for Linux; only asked where pip's own sources have none.
TORCH_CPU_INDEX=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}

say() { printf 'set-up: %s\n' "$*"; }
die() { say "$*" >&2; exit 1; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
  die "needs Python >= 3.11, and $python is not; try make PYTHON=python3.12"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
  die "$python has no venv module (on Debian and Ubuntu: apt install python3-venv)"

system_torch=$("$python" -c 'import torch; print(torch.cuda.is_available())' 2>/dev/null || true)
if [ "$system_torch" = True ]; then found=system
elif nvidia-smi -L >/dev/null 2>&1; then found=nvidia
elif [ -e /dev/kfd ]; then found=amd
else found=none; fi

[ $found != amd ] || die "an AMD GPU, but $python has no torch that sees it: install the ROCm" \
  "build of torch first (https://pytorch.org/get-started/locally), then run make again"

share=(); [ $found != system ] || share=(--system-site-packages)
say "$venv with $("$python" --version), GPU: $found"
"$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
  "$python" -m venv --clear "${share[@]}" "$venv"
say "installing torch and tools; the first time a few hundred MB and a minute"

install() { tools/ticks.sh set-up "$python" tools/install.py "$venv" "$@"; }

if [ $found = system ]; then
  install --group tools --editable .
else
  pin=$("$python" -c 'import tomllib; groups = tomllib.load(open("pyproject.toml", "rb"))
print(next(p for p in groups["dependency-groups"]["torch"] if p.startswith("torch==")))')
  if [ $found = none ] && [ "$(uname -s)" = Linux ]; then
    install "$pin+cpu" 2>/dev/null ||
      install --index-url "$TORCH_CPU_INDEX" "$pin"
    install --group dev --editable .
  elif [ $found = none ]; then
    install --group dev --editable .
  else
    install "$pin" --group tools --editable .
  fi
fi
say "$("$venv/bin/python" -c 'import torch; print("torch", torch.__version__)'), ready"
