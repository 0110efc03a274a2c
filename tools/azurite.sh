#!/usr/bin/env bash
# Install the Azure storage server that tests of mirrors use.
#
#   tools/azurite.sh .azurite
#
# A folder of its own, from npm. Where it cannot be made, the tests that need it skip.
set -euo pipefail

folder=$1
if [ -e "$folder/node_modules/azurite/package.json" ]; then
    exit 0
fi
if ! command -v npm >/dev/null; then
    echo "could not install azurite: npm is missing; the tests that need it will skip"
    exit 0
fi
mkdir -p "$folder"
npm install --no-audit --no-fund --ignore-scripts --omit=dev --loglevel=error --prefix "$folder" 'azurite@^3.35' \
    >/dev/null || echo "could not install azurite; the tests that need it will skip"
