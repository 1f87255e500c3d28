#!/bin/bash
# One run on 8 nodes of 8 devices: sbatch train/launch/slurm.sh train/configs/paper.yaml [key=value ...]
# Ninety seconds before its time is up Slurm asks it to end: it saves, and is queued again.
#SBATCH --job-name=cvpo
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@90
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
config=${1:?usage: sbatch train/launch/slurm.sh CONFIG [key=value ...]}
shift
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
srun --kill-on-bad-exit=1 bash -c 'exec "$@"' launch \
    torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=8 \
    --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$head:29500" \
    -m train run --config "$config" "$@"
