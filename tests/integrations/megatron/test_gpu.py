"""On a GPU, over NCCL, without stand-ins: training under whatever Megatron is installed equals inline training."""

import importlib.util
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core"),
]
HERE = Path(__file__).parent

PROGRAM = """
import json, sys
import torch, torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29555", rank=0, world_size=1)
import mcore_world
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
mcore_world.groups()
model_parallel_cuda_manual_seed(1)
from training_cases import compare_axes
for axes in json.loads(sys.argv[1]):
    count, differ = compare_axes(axes)
    print(json.dumps([axes, count, differ]), flush=True)
dist.destroy_process_group()
"""


def test_training_equals_inline_on_one_gpu():
    cases = [
        {"world": 1, "distopt": d, "overlap": o, "schedule": s, "layout": layout, "precision": "bf16", "fused": True}
        for d, o, s, layout in product((False, True), (False, True), ("each", "flush"), ("grouped", "discrete"))
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(cases)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[2])])},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(results) == len(cases)
    assert [(axes, differ) for axes, count, differ in results if differ or count != 42] == []
