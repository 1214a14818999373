#!/usr/bin/env bash
# Create a virtual environment and install zerofit with pinned dependencies: setup.sh FOLDER
# torch comes with CUDA where there is an NVIDIA GPU, and without where there is none (a few GB less).
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: setup.sh FOLDER}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
  echo "zerofit needs Python 3.10 or newer, and $python is $("$python" --version). Try: make PYTHON=python3.12 ..." >&2
  exit 2
}
"$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt)

if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  torch=$(grep '^torch==' constraints.txt)
  index=()
  if [ "$(uname -s)" = Linux ] && ! nvidia-smi -L >/dev/null 2>&1; then
    # The default Linux build brings CUDA. Take the CPU build: pip's own sources may have it, else torch's index does.
    offered=$("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --dry-run --ignore-installed \
      --no-deps --report - "$torch" 2>/dev/null || true)
    case $offered in
      *+cpu* | *%2Bcpu*) ;;
      *) index=(--index-url https://download.pytorch.org/whl/cpu) ;;
    esac
  fi
  echo "installing $torch ..."
  "${pip[@]}" "$torch" ${index[@]+"${index[@]}"}
fi
echo "installing the other dependencies ..."
"${pip[@]}" --editable '.[trackers,dev,megatron]'
echo "ready: $venv"
