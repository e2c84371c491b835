#!/usr/bin/env bash
# Train with torchrun on this host, or on each of several hosts.
#
#   launch/torchrun.sh CONFIG [--set section.key=value]... [--resume [PATH|latest]]
#
# NPROC    processes on this host; without it one for each GPU, or 2 on a host without GPUs
# NNODES   hosts, 1 without it; for more, run this script on every host with NODE_RANK (0, 1, ...) and MASTER_ADDR
#          (host 0's name or address) set, and MASTER_PORT (29500 without it) if that port is taken
set -euo pipefail

if [ $# -lt 1 ]; then
  echo "usage: launch/torchrun.sh CONFIG [--set section.key=value]... [--resume [PATH|latest]]" >&2
  exit 2
fi

num_gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
if [ "$num_gpus" -eq 0 ]; then
  num_gpus=2
fi
processes=(--nproc-per-node "${NPROC:-$num_gpus}")

if [ "${NNODES:-1}" -eq 1 ]; then
  hosts=(--standalone)
else
  : "${NODE_RANK:?must be set on every one of the $NNODES hosts: 0, 1, ...}"
  : "${MASTER_ADDR:?must name host 0 on every one of the $NNODES hosts}"
  hosts=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
fi

# Ranks compute with few threads each unless told otherwise: all of them share this host's cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# A notice of pre-emption reaches the ranks, which save and stop, whether it comes as SIGTERM or as SIGUSR1.
export TORCHELASTIC_SIGNALS_TO_HANDLE="${TORCHELASTIC_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}"
exec torchrun "${hosts[@]}" "${processes[@]}" -m moe_runtime train "$@"
