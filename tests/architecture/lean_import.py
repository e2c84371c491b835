"""Import the package and all its public names in a fresh process, and report what it did meanwhile."""

import os
import subprocess
import sys
from pathlib import Path

# Runs in the child. A read or a call counts when the nearest frame outside os.py belongs to the package: what torch and
# other libraries do while they are imported is theirs.
_PROBE = """
import os, sys
import numpy, torch
package_folder = os.path.join(sys.argv[1], "moe_runtime") + os.sep
skipped = {os.__file__, sys.modules["_collections_abc"].__file__, "<frozen os>", "<frozen _collections_abc>"}

def called_by_package():
    frame = sys._getframe(2)
    while frame and frame.f_code.co_filename in skipped:
        frame = frame.f_back
    return frame and frame.f_code.co_filename.startswith(package_folder)

class Spy(type(os.environ)):
    def __getitem__(self, key):
        if called_by_package():
            print("reads the environment variable", key)
        return super().__getitem__(key)
    def __iter__(self):
        if called_by_package():
            print("reads the whole environment")
        return super().__iter__()
    def __contains__(self, key):
        if called_by_package():
            print("reads the environment variable", key)
        return super().__contains__(key)

os.environ.__class__ = Spy
for name in "is_available device_count current_device get_device_capability get_device_properties init".split():
    def spy(*arguments, _name=name, _call=getattr(torch.cuda, name), **options):
        if called_by_package():
            print("calls torch.cuda." + _name)
        return _call(*arguments, **options)
    setattr(torch.cuda, name, spy)

import moe_runtime
assert moe_runtime.__file__.startswith(package_folder), moe_runtime.__file__
for name in dir(moe_runtime):  # public names may be loaded on first use
    getattr(moe_runtime, name)
if torch.cuda.is_initialized():
    print("initializes CUDA")
for name in sys.argv[2:]:
    if name in sys.modules:
        print("imports", name)
"""


def lean_import_faults(root: Path, heavy: list[str]) -> list[str]:
    """What importing `root`/moe_runtime reads, calls or drags in; `heavy` names the modules it must leave alone."""
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", _PROBE, str(root), *heavy]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        return [f"import moe_runtime fails: {done.stderr.strip().splitlines()[-1]}"]
    return [f"import moe_runtime {line}" for line in done.stdout.splitlines()]
