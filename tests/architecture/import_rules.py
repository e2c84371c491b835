"""Who may import whom: the house's table, third-party homes, no import of ours inside a function, no cycle."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from source_tree import PACKAGE, Module, layer_of, walk_with_scope

_LOWER = "core formats precision kernels comm runtime tensor functional ep nn optim parallel checkpoint integrations"

# package -> what it may import besides itself. `moe_runtime` is its __init__.py, the public names.
MAY_IMPORT = {
    "core": "",
    "formats": "core",
    "comm": "core",
    "runtime": "core",
    "report": "core",
    "precision": "core formats",
    "kernels": "core formats",
    "planner": "core formats precision",
    "tensor": "core formats kernels",
    "functional": "core formats precision kernels tensor runtime",
    "ep": "core comm kernels",
    "nn": "core formats precision comm tensor functional ep runtime",
    "optim": "core precision comm kernels tensor",
    "checkpoint": "core formats comm tensor",
    "parallel": "core comm runtime tensor ep nn optim",
    "integrations": "core comm precision kernels runtime tensor functional ep nn optim parallel checkpoint",
    "train": _LOWER,
    "moe_runtime": f"{_LOWER} train planner report",
    "testing": f"{_LOWER} train planner report moe_runtime",
    "bench": f"{_LOWER} train planner report moe_runtime testing",
    "cli": f"{_LOWER} train planner report moe_runtime testing bench",
    "__main__": "cli",
}

# Third-party packages beyond torch and numpy -> the only places that may import them. Anything else is a fault.
EVERYWHERE = ("torch", "numpy")
NATIVE_EXTENSION = "moe_runtime._C"  # an install may lack it, so it is loaded by name
# Modules that load others on first use, for a fast start. The texts in them that name modules count as imports.
LAZY_LOADERS = ("moe_runtime", "moe_runtime.cli.lazy")
HOMES = {
    "transformers": ("integrations.transformers",),
    "huggingface_hub": ("integrations.transformers",),
    "jinja2": ("integrations.transformers",),
    "peft": ("integrations.peft",),
    "megatron": ("integrations.megatron",),
    "apex": ("integrations.apex",),
    "triton": ("kernels", "bench", "testing"),
    "mpi4py": ("comm",),
    "safetensors": ("checkpoint",),
    "tokenizers": ("train", "integrations.transformers"),
    "pyarrow": ("train",),
    "wandb": ("train",),
    "tensorboard": ("train",),
    "torch.utils.tensorboard": ("train",),
    "rich": ("train", "cli"),
    "matplotlib": ("report",),
    "typer": ("cli",),
    "pytest": ("testing",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """One imported module, by its full dotted name."""

    target: str
    node: ast.AST
    in_function: bool = False
    is_lazy: bool = False

    @property
    def is_ours(self) -> bool:
        return self.target.split(".")[0] == PACKAGE


def imports_of(module: Module, modules: dict[str, Module]) -> Iterator[Import]:
    """Every import of `module`; `from package import name` targets package.name where that is a module."""
    for node, in_function in walk_with_scope(module.tree):
        if isinstance(node, ast.Constant) and module.name in LAZY_LOADERS and node.value in modules:
            yield Import(target=str(node.value), node=node, is_lazy=True)
        elif isinstance(node, ast.Call) and (name := _named_module(node)) and name != NATIVE_EXTENSION:
            yield Import(target=name, node=node, in_function=True)
        for target in dict.fromkeys(_statement_targets(node, module, modules)):
            yield Import(target=target, node=node, in_function=in_function)


def _statement_targets(node: ast.AST, module: Module, modules: dict[str, Module]) -> list[str]:
    """What an import statement imports, by full names; nothing for any other node."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = _absolute(module, node)
    names = [f"{base}.{alias.name}" for alias in node.names]
    return [name if name in modules or base.split(".")[0] != PACKAGE else base for name in names]


def _named_module(call: ast.Call) -> str | None:
    """The literal in `import_module("x")`, "" where the name is computed, None for any other call."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if function not in ("import_module", "__import__"):
        return None
    name = call.args[0] if call.args else None
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    """The dotted name that a `from ... import` reads, relative dots resolved."""
    if not node.level:
        return node.module or ""
    package = module.name.split(".") if module.path.endswith("__init__.py") else module.name.split(".")[:-1]
    package = package[: len(package) - (node.level - 1)]
    return ".".join([*package, *([node.module] if node.module else [])])


def direction_faults(modules: dict[str, Module]) -> list[str]:
    """Imports between packages of the house that the table does not list."""
    faults = []
    for module in modules.values():
        for found in imports_of(module, modules):
            target = layer_of(found.target)
            if not found.is_ours or target == module.layer:
                continue
            if module.layer not in MAY_IMPORT:
                faults.append(module.fault(found.node, f"package {module.layer!r} is not in the import table"))
            elif target not in MAY_IMPORT[module.layer].split():
                faults.append(module.fault(found.node, f"{module.layer} may not import {found.target}"))
    return faults


def function_import_faults(modules: dict[str, Module]) -> list[str]:
    """Our own modules imported inside a function or by name, and imports whose name is computed."""
    faults = []
    for module in modules.values():
        for found in imports_of(module, modules):
            if found.is_ours and found.in_function:
                faults.append(module.fault(found.node, f"import of {found.target} inside a function or by name"))
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and _named_module(node) == "" and module.name not in LAZY_LOADERS:
                faults.append(module.fault(node, "import of a computed name"))
    return faults


def third_party_faults(modules: dict[str, Module]) -> list[str]:
    """Third-party packages imported outside their homes."""
    faults = []
    for module in modules.values():
        for found in imports_of(module, modules):
            top = found.target.split(".")[0]
            if found.is_ours or top in sys.stdlib_module_names:
                continue
            keys = [key for key in HOMES if _is_within(found.target, key)]
            homes = [home for key in keys for home in HOMES[key]]
            if not keys and top not in EVERYWHERE:
                faults.append(module.fault(found.node, f"{top} has no home in tests/architecture/import_rules.py"))
            elif keys and not any(_is_within(module.name, f"{PACKAGE}.{home}") for home in homes):
                faults.append(module.fault(found.node, f"{keys[-1]} may be imported only by {', '.join(homes)}"))
    return faults


def _is_within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def cycle_faults(modules: dict[str, Module]) -> list[str]:
    """One fault for each set of modules that import each other, directly or through others."""
    graph = {
        name: {found.target for found in imports_of(module, modules) if found.target in modules and not found.is_lazy}
        for name, module in modules.items()
    }
    reach = {name: _reachable(graph, name) for name in graph}
    cycles = {frozenset({name, *(b for b in reach[name] if name in reach[b])}) for name in graph if name in reach[name]}
    return sorted(f"{PACKAGE}: import cycle: {' <-> '.join(sorted(cycle))}" for cycle in cycles)


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    pending = list(graph[start])
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            pending.extend(graph[name])
    return seen
