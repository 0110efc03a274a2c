#!/usr/bin/env bash
# Install what `make bench` measures beside the project, each in an environment of its own, by name and version.
#
#   tools/peers.sh .peers
#
# Nothing of them is kept in the repository. torch comes first and pinned, as tools/install.sh takes it: a machine without
# a GPU must not be given gigabytes of CUDA packages by a dependency.
set -euo pipefail

folder=$1
torch=$(grep '^torch==' constraints.txt)

# install NAME CONSTRAINTS PACKAGE==VERSION: one peer, unless it is there.
install() {
    local name=$1 constraints=$2 version=$3
    local venv="$folder/$name"
    local mark="$venv/.installed-$version-$torch"
    [ -e "$mark" ] && return
    "${PYTHON:-python3}" -m venv "$venv"
    local pip="$venv/bin/pip --disable-pip-version-check"
    if ! command -v nvidia-smi >/dev/null; then
        # Ask pip what it would install before it installs anything.
        if $pip install --quiet --dry-run --report - -c constraints.txt "$torch" | grep -qiE '"name": *"(nvidia|cuda)[-_]'
        then
            echo "no GPU here, and the torch that pip would take brings CUDA packages: see tools/install.sh" >&2
            exit 1
        fi
    fi
    $pip install --quiet -c "$constraints" "$torch" numpy
    $pip install --quiet -c "$constraints" "$version"
    touch "$mark"
}

mkdir -p "$folder"
# These want another numpy or datasets than the tests do: of the constraints only torch holds for them.
echo "$torch" >"$folder/torch.txt"

for peer in accelerate lightning; do
    install "$peer" constraints.txt "$(grep "^$peer==" constraints.txt)"
done
install gpt-simple "$folder/torch.txt" gpt-simple-lm==0.1.2
install torchtitan "$folder/torch.txt" torchtitan==0.3.0
