#!/usr/bin/env bash
# Make the environment of the S3 server that tests of mirrors use.
#
#   tools/moto.sh .moto
#
# An environment of its own: its client library and those of the project would make pip search for ten minutes. Where it
# cannot be made, the tests that need it skip; with CI=true they fail in its place.
set -euo pipefail

venv=$1
if [ -x "$venv/bin/moto_server" ]; then
    exit 0
fi
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" --disable-pip-version-check install --quiet 'moto[server,s3]>=5.1,<6' ||
    echo "could not install moto; the tests that need it will skip"
