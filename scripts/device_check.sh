#!/usr/bin/env bash
# Check this machine's chip: the platform part of the conformance kit, with nothing but Python, torch and this checkout.
# Prints one JSON report on standard output, progress on standard error, in less than three minutes whatever hangs.
# Exit status: 0 all passed, 1 a check failed, 2 the platform can't be asked.
#
#   scripts/device_check.sh                                   the platform that is detected here
#   scripts/device_check.sh verl_fl.platform.cuda:CUDAPlatform
#   PYTHON=python3.11 scripts/device_check.sh > docs/conformance/cuda.json
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
if ! said=$("$python" -c 'import sys; assert sys.version_info >= (3, 10), sys.version; import torch' 2>&1); then
    printf '%s\n' "device_check.sh: this needs Python 3.10 or later with torch: ${said##*$'\n'}" \
        "  asked: $python" "  do: name the Python that has the chip's torch: PYTHON=/path/to/python $0" >&2
    exit 2
fi
PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m verl_fl.testing.conformance --timeout 60 --within 165 "$@" --json -
