#!/usr/bin/env bash
# Make a virtual environment and install the project with all that its tests use.
#
#   tools/install.sh .venv
#
# A machine without a GPU gets the CPU build of torch or a clear message; gigabytes of CUDA packages are never pulled.
set -euo pipefail

venv=$1
pip="$venv/bin/pip --disable-pip-version-check"
torch=$(grep '^torch==' constraints.txt)

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"

if ! command -v nvidia-smi >/dev/null; then
    # Ask pip what it would install before it installs anything.
    plan=$($pip install --quiet --dry-run --report - -c constraints.txt "$torch")
    if grep -qiE '"name": *"(nvidia|cuda)[-_]' <<<"$plan"; then
        cat >&2 <<'MESSAGE'
This machine has no GPU, and the torch that pip would take brings the CUDA packages with it, several gigabytes.
  so   nothing was installed
  help get the CPU build: PyTorch's installation page names an index for the compute platform "CPU"; then
         PIP_EXTRA_INDEX_URL=<that index> make test
       or put the CPU wheel in a folder and
         PIP_FIND_LINKS=<that folder> make test
MESSAGE
        exit 1
    fi
fi

$pip install --quiet -c constraints.txt "$torch"
$pip install --quiet -c constraints.txt -e '.[test]'
# Without what torchtitan depends on: it asks for an older `datasets` than the other tests use, and its checkpoint manager
# needs of all that tyro alone.
$pip install --quiet -c constraints.txt --no-deps torchtitan tyro docstring-parser
