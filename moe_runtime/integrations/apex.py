"""NVIDIA's apex as an optimizer backend. The only module that imports apex, when it is asked for.

    optimizer = mr.optim.MasterWeights(fused_adam(), model.parameters(), lr=1e-3)

torch's own optimizers are the default everywhere. NVIDIA's apex is built from its source for one torch and one CUDA.
The package of that name on the package index is another project, of the web; it is recognized without importing it.
"""

import importlib.util
from pathlib import Path

from torch.optim import Optimizer

from moe_runtime.core.errors import UnsupportedError

_BUILD = "build NVIDIA's from source, with --cpp_ext --cuda_ext, for this torch and CUDA"


def fused_adam() -> type[Optimizer]:
    """`apex.optimizers.FusedAdam`: AdamW in one kernel over all parameters, decoupled weight decay by default.

    Raises UnsupportedError where apex is missing, is another project of that name, or was built without its kernels.
    """
    spec = importlib.util.find_spec("apex")
    if spec is None:
        raise UnsupportedError(f"apex.optimizers.FusedAdam needs apex, which is not installed: {_BUILD}")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "optimizers").is_dir() for folder in folders):
        raise UnsupportedError(
            f"the apex that is installed, at {spec.origin}, is another project of that name and has no optimizers: "
            f"uninstall it, and {_BUILD}"
        )
    if importlib.util.find_spec("amp_C") is None:
        raise UnsupportedError(f"apex is installed without its CUDA kernels (no module amp_C): {_BUILD}")
    from apex.optimizers import FusedAdam

    return FusedAdam
