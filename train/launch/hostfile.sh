#!/bin/bash
# One run on the machines of a hostfile (lines of "name slots=8"), by DeepSpeed's launcher over ssh:
#   train/launch/hostfile.sh HOSTFILE CONFIG [key=value ...]
set -euo pipefail
hostfile=${1:?usage: hostfile.sh HOSTFILE CONFIG [key=value ...]}
config=${2:?usage: hostfile.sh HOSTFILE CONFIG [key=value ...]}
shift 2
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
exec deepspeed --hostfile "$hostfile" --module train run --config "$config" "$@"
