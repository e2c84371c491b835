"""A small task that any Python carries: the first line of a docstring, from the signature it stands under.

The files are those of `data.source = "stdlib"`, so with the same `validation_fraction` the modules held out here are
those that pre-training held out.
"""

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from moe_runtime.train.data.sources import list_standard_library

MAX_CHARS = 400  # of a prompt: longer ones are rare, and signatures of hundreds of constants teach nothing

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def docstring_pairs() -> Iterator[tuple[str, str, str]]:
    """(module's file name, prompt, completion) for each documented function and class, in the order of files and lines.

    A pair that occurs again in a module is given once.
    """
    source = list_standard_library(Path(sysconfig.get_paths()["stdlib"]))
    for file in source.files:
        tree = _parsed("".join(piece.text for piece in source.pieces(file)))
        pairs = {} if tree is None else dict.fromkeys(_pairs(tree, file.name.removesuffix(".py").replace("/", ".")))
        for prompt, completion in pairs:
            yield file.name, prompt, completion


def _parsed(text: str) -> ast.Module | None:
    """A module's syntax tree; None where it does not parse, as templates of the library's tools do not."""
    try:
        return ast.parse(text)
    except SyntaxError:
        return None


def _pairs(tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
    pending: list[tuple[ast.AST, str]] = [(tree, module)]
    while pending:
        node, path = pending.pop()
        children = [child for child in ast.iter_child_nodes(node) if isinstance(child, Definition)]
        pending += [(child, f"{path}.{child.name}") for child in reversed(children)]
        if isinstance(node, Definition):
            summary = (ast.get_docstring(node) or "").strip().partition("\n")[0].strip()
            prompt = f"{_signature(node, path)}\nsummary:"
            if summary and len(prompt) <= MAX_CHARS:
                yield prompt, f" {summary}"


def _signature(node: Definition, path: str) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {path}({bases})" if bases else f"class {path}"
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"def {path}({ast.unparse(node.args)}){result}"
