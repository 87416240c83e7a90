#!/usr/bin/env bash
# Check this machine's chip: the platform part of the conformance kit, with nothing but Python, torch and this checkout;
# then weight sync from this chip to another process on it, by each transport, if the small package xxhash is here too.
# Prints one JSON report on standard output, progress and GB/s on standard error; the kit ends in less than three minutes
# whatever hangs, the transports in less than two.
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
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
status=0
"$python" -m verl_fl.testing.conformance --timeout 60 --within 165 "$@" --json - || status=$?
if ! "$python" -c 'import xxhash' 2> /dev/null; then
    echo "device_check.sh: weight sync not measured: $python has no package xxhash" >&2
    exit "$status"
fi
device=$("$python" -c 'import torch
chip = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
print(chip.type if chip else "cpu")')
echo "weight sync, $device to $device in another process:" >&2
timeout 120 "$python" -m verl_fl.weight_sync.probe --device "$device" >&2 || status=1
exit "$status"
