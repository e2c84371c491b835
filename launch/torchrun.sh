#!/usr/bin/env bash
# Train with torchrun on this host, or on each of several hosts.
#
#   launch/torchrun.sh CONFIG [--set section.key=value]... [--resume [PATH|latest]]
#
# NPROC    processes on this host; without it one for each GPU, or 2 on a host without GPUs
# NNODES   hosts, 1 without it; for more, run this script on every host with NODE_RANK (0, 1, ...) and MASTER_ADDR
#          (host 0's name or address) set, and MASTER_PORT (29500 without it) if that port is taken
# JOB      a name that no other launch has, the same on every host: hosts may come and go within NNODES ("2:4"), NODE_RANK
#          is not read, and the run goes on after up to MAX_RESTARTS (3 without it) failures
set -euo pipefail

if [ $# -lt 1 ]; then
  echo "usage: launch/torchrun.sh CONFIG [--set section.key=value]... [--resume [PATH|latest]]" >&2
  exit 2
fi

num_gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
[ "$num_gpus" -gt 0 ] || num_gpus=2
processes=(--nproc-per-node "${NPROC:-$num_gpus}")

if [ -n "${JOB:-}" ]; then
  : "${MASTER_ADDR:?must name one of the hosts, the same on every one}"
  hosts=(--nnodes "${NNODES:-1}" --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}"
    --rdzv-id "$JOB" --max-restarts "${MAX_RESTARTS:-3}")
elif [ "${NNODES:-1}" -eq 1 ]; then
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
# Each start has a store of its own: a host that joins later never learns the address of one that is shared.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE="${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}"
exec torchrun "${hosts[@]}" "${processes[@]}" -m moe_runtime train "$@"
