"""The package under test as parsed source: nothing here imports it, so a broken module is still judged."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "moe_runtime"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """One parsed file. `name` is its dotted import name; a package's `__init__.py` carries the package's own name."""

    name: str
    path: str
    source: str
    tree: ast.Module

    @property
    def layer(self) -> str:
        """The package of the house that owns this file."""
        return layer_of(self.name)

    def fault(self, node: ast.AST, message: str) -> str:
        """`path:line: message`, what every rule reports."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {message}"


def layer_of(name: str) -> str:
    """moe_runtime.tensor.grouped_tensor -> tensor; moe_runtime -> moe_runtime."""
    return name.split(".")[1] if "." in name else name


def load_modules(root: Path) -> dict[str, Module]:
    """Parse every .py file of `root`/moe_runtime, keyed by dotted name."""
    modules = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        relative = path.relative_to(root)
        parts = relative.with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source, filename=str(relative))
        modules[name] = Module(name=name, path=relative.as_posix(), source=source, tree=tree)
    return modules


def walk_with_scope(tree: ast.AST, *, in_function: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every node below `tree`, with whether it stands inside a function body."""
    for node in ast.iter_child_nodes(tree):
        yield node, in_function
        yield from walk_with_scope(node, in_function=in_function or isinstance(node, FUNCTIONS))


def module_level(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when the module is imported, those under if, try, with and for included."""
    for statement in statements:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With | ast.For | ast.While):
            for field in ("body", "orelse", "finalbody"):
                yield from module_level(getattr(statement, field, []))
            for handler in getattr(statement, "handlers", []):
                yield from module_level(handler.body)


def last_name(node: ast.AST) -> str:
    """`a.b.c` -> c, `c` -> c, a call or subscript -> the name of what it is applied to, anything else -> ""."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
