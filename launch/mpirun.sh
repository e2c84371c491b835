#!/usr/bin/env bash
# Train with mpirun (Open MPI) or mpiexec (MPICH, Intel MPI), on this host or on those that the launcher is told of.
#
#   launch/mpirun.sh CONFIG [--set section.key=value]... [--resume [PATH|latest]]
#
# NPROC        processes in all; without it one for each GPU of this host, or 2 on a host without GPUs
# MPIRUN       the launcher and its options, "mpirun" without it; hosts are named there
# MASTER_ADDR  host of rank 0, needed with more than one host; MASTER_PORT as well if 29500 is taken
set -euo pipefail

if [ $# -lt 1 ]; then
  echo "usage: launch/mpirun.sh CONFIG [--set section.key=value]... [--resume [PATH|latest]]" >&2
  exit 2
fi

num_gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
if [ "$num_gpus" -eq 0 ]; then
  num_gpus=2
fi

# Ranks compute with few threads each unless told otherwise: all of a host share its cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
read -ra launcher <<<"${MPIRUN:-mpirun}"
exec "${launcher[@]}" -n "${NPROC:-$num_gpus}" python -m moe_runtime train "$@"
