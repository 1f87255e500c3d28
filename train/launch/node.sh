#!/bin/bash
# One run on this machine's devices: train/launch/node.sh DEVICES CONFIG [key=value ...]
set -euo pipefail
devices=${1:?usage: node.sh DEVICES CONFIG [key=value ...]}
config=${2:?usage: node.sh DEVICES CONFIG [key=value ...]}
shift 2
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
exec torchrun --standalone --nproc-per-node="$devices" -m train run --config "$config" "$@"
