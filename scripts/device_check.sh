#!/usr/bin/env bash
# Check this machine's chip: the platform part of the conformance kit, with nothing but Python, torch and this checkout.
# Prints one JSON report on standard output, progress on standard error. Exit status: 0 all passed, 1 a check failed,
# 2 the platform can't be asked.
#
#   scripts/device_check.sh                                   the platform that is detected here
#   scripts/device_check.sh verl_fl.platform.cuda:CUDAPlatform
#   PYTHON=python3.11 scripts/device_check.sh > docs/conformance/cuda.json
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" -m verl_fl.testing.conformance "$@" --timeout 60 --json -
