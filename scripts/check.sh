#!/usr/bin/env bash
# Every test on a build, models fetched first. Usage: check.sh [BUILD FOLDER] [options of tests/run.py]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build}
[ $# = 0 ] || shift
scripts/setup.sh --quiet
for model in smollm2-135m gemma3-270m; do
    scripts/fetch-model.sh $model >/dev/null || echo "check: without $model its tests are skipped" >&2
done
python=/usr/bin/python3
[ -x "$python" ] || python=python3
exec "$python" tests/run.py "$build" "$@"
