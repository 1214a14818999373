#!/usr/bin/env bash
# Create a virtual environment and install zerofit with the versions of constraints.txt: setup.sh FOLDER [PART]
# PART is `dependencies`, which leaves this clone out (Dockerfile), or `torch==VERSION`, which installs nothing else
# (scripts/test_versions.py).
# Each file that pip takes has a hash that constraints.txt names, but for three: torch of another source than PyPI, which
# has hashes of its own; the build tools of packages that come as source; and this clone.
# torch comes with CUDA where the machine has an NVIDIA GPU, and without where it has none (a few GB less). To choose:
#   TORCH=cpu                       no GPU, whatever the machine has
#   TORCH=cuda                      with CUDA, for instance on a login node whose compute nodes have GPUs
#   TORCH='torch --index-url URL'   any other build, such as ROCm's for AMD GPUs: what pip install is to be told
# What was chosen holds until something else is.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: setup.sh FOLDER [dependencies]}
python=${PYTHON:-python3}
chosen=$(cat "$venv/.torch" 2>/dev/null || true)
choice=${TORCH:-$chosen}
case ${2:-} in
  torch==*) pinned=$2 ;;
  *) pinned=$(grep -o '^torch==[^ ]*' constraints.txt) ;;
esac

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
  echo "zerofit needs Python 3.11 or newer, and $python is $("$python" --version 2>&1 || true)." \
    "Name another one: make PYTHON=python3.12 ..." >&2
  exit 2
}
"$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
gpus=$("$venv/bin/python" zerofit/strategy/gpus.py)

has_the_torch() {
  local version=$pinned
  case $choice in '' | cpu | cuda) ;; *) version='' ;; esac
  [ "$choice" = "$chosen" ] && "$venv/bin/python" -c 'import sys, torch
sys.exit(sys.argv[1] not in ("", "torch==" + torch.__version__.partition("+")[0]))' "$version" 2>/dev/null
}

install_torch() {
  local words=("$pinned")
  case ${choice:-${gpus:-cpu}} in
    cpu)
      # On Linux the default build brings CUDA. pip's own sources may have the CPU build, else torch's index does.
      if [ "$(uname -s)" = Linux ]; then
        local offered
        offered=$("${pip[@]}" --dry-run --ignore-installed --no-deps --report - "$pinned" 2>/dev/null || true)
        case $offered in
          *+cpu* | *%2Bcpu*) ;;
          *) words+=(--index-url https://download.pytorch.org/whl/cpu) ;;
        esac
      fi
      ;;
    cuda | NVIDIA*) words=(--require-hashes --no-deps --requirement "$venv/torch.txt") ;;
    AMD)
      echo "this machine has an AMD GPU, for which torch comes from an index of its own, one for each version of ROCm:" \
        "TORCH='torch --index-url URL' make setup, with the URL from pytorch.org/get-started; or TORCH=cpu make setup" >&2
      exit 2
      ;;
    *) read -ra words <<<"$choice" ;;
  esac
  echo "installing ${words[*]} ..."
  "$venv/bin/python" -m pip uninstall --quiet --yes torch 2>/dev/null || true  # pip takes 2.13.0+cpu for 2.13.0
  "${pip[@]}" "${words[@]}"
  echo "$choice" >"$venv/.torch"
}

# torch and what its build with CUDA brings; torchao; and all else, which is the same with any build
awk -v folder="$venv" '/^[^ ]/ { file = /^(torch|triton|nvidia-.*|cuda-.*)==/ ? "torch" : /^torchao==/ ? "optional" : "others" }
  { print > folder "/" file ".txt" }' constraints.txt
has_the_torch || install_torch
case ${2:-} in torch==*) exit ;; esac
echo "installing the other dependencies ..."
"${pip[@]}" --require-hashes --no-deps --requirement "$venv/others.txt"
if [ "${2:-}" = dependencies ]; then exit; fi
"${pip[@]}" --no-deps --no-build-isolation --editable .
# For tests alone, in a folder of its own: where torchao is installed, transformers imports it as each program starts,
# which takes about a second. To use it: pip install '.[float8]'
"${pip[@]}" --require-hashes --no-deps --upgrade --target "$venv/optional" --requirement "$venv/optional.txt"
if [ "$choice" != cpu ]; then
  "$venv/bin/python" - <<'PYTHON'
import sys

from zerofit.recipe.errors import UserError
from zerofit.strategy.gpus import check_devices

try:
    check_devices()
except UserError as error:
    print(f"{error.report()}. Or, for the CPU alone: TORCH=cpu make setup", file=sys.stderr)
    sys.exit(2)
PYTHON
fi
echo "ready: $venv"
