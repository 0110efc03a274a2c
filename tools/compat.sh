#!/usr/bin/env bash
# Run the tests that depend on torch with other versions of it, each in an environment of its own.
#
#   tools/compat.sh 2.6.0 2.10.0                       the versions to test
#   PYTHON=python3.13 tools/compat.sh 2.13.0           with another Python
#   COMPAT_TESTS="tests/unit/exact" tools/compat.sh 2.9.0
#
# Environments are made once, under $COMPAT_HOME (default .compat), of about 5 GB each where pip brings the CUDA build,
# and used again. The results are written to docs/measured/compat/; `tools/compat.py` makes the tables of them.
set -euo pipefail
cd "$(dirname "$0")/.."

home=${COMPAT_HOME:-.compat}
python=${PYTHON:-python3}
tests=${COMPAT_TESTS:-tests/unit/store tests/unit/state tests/unit/loop tests/unit/exact tests/unit/gpt tests/distributed tests/exact}
minor=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
mkdir -p "$home" docs/measured/compat

# What the tests use besides torch: as in constraints.txt, but for what needs a certain torch, or torch a certain one of.
packages() {
    grep -vE '^(#|torch==|sympy==|mypy|ruff|import-linter|grimp|lazy-importer|librt|ast_serialize)' constraints.txt
}

for version in "$@"; do
    env=$home/torch-$version-py$minor
    if [ ! -e "$env/.ready" ]; then
        "$python" -m venv "$env"
        packages >"$env/packages.txt"
        "$env/bin/pip" install --quiet "torch==$version"
        # Named again: pip would rather replace torch than fail.
        "$env/bin/pip" install --quiet -c "$env/packages.txt" "torch==$version" \
            click rich pyyaml xxhash numpy tokenizers zstandard pyarrow \
            pytest pytest-timeout pytest-xdist hypothesis safetensors torchdata accelerate lightning transformers datasets grain
        touch "$env/.ready"
    fi
    result=docs/measured/compat/torch-$version-py$minor.json
    echo "torch $version, Python $minor: $result"
    # A test that fails is a result, and the next version is to be tested all the same.
    # Whole paths: some tests start the tool in a folder of their own.
    # shellcheck disable=SC2086
    COMPAT_RESULT=$result COMPAT_TESTS=$tests OMP_NUM_THREADS=1 PYTHONPATH=$PWD/src:$PWD \
        "$env/bin/python" -m pytest -q -p no:cacheprovider -p tests.compat_plugin -n "${WORKERS:-2}" --tier quick \
        --tb=short -o console_output_style=classic $tests >"$env/log.txt" 2>&1 || true
    tail -n 1 "$env/log.txt"
done
