"""What a single file of the package may hold: sizes, state, environment, exceptions, documentation."""

import ast
import re
from collections.abc import Iterator

from source_tree import FUNCTIONS, Module, last_name, module_level

MAX_FILE_LINES, MAX_KERNEL_FILE_LINES, MAX_FUNCTION_LINES, MAX_ARGUMENTS = 600, 1000, 80, 8
KERNEL_FILES = frozenset[str]()  # paths of kernel files that need more than 600 lines
# Public constructors whose arguments the users of Transformer Engine and Megatron already know, one by one.
FIXED_SIGNATURES = frozenset(
    {"moe_runtime.nn.grouped_linear.GroupedLinear.__init__", "moe_runtime.nn.grouped_mlp.GroupedMLP.__init__"}
)
# A compiler or an op schema fixes these signatures: no frozen value can carry their arguments.
KERNEL_DECORATORS = frozenset({"jit", "custom_op", "triton_op", "register_fake", "impl"})
ENVIRONMENT_READER = "moe_runtime.core.env"
BOOTSTRAP = "moe_runtime.comm.bootstrap"
REGISTRIES = frozenset[str]()  # "module.name" of the tables that are filled while their package is imported

# Calls that make a value which holds state, and methods that change one.
MUTABLE_TYPES = re.compile(
    r"list|dict|set|bytearray|deque|defaultdict|OrderedDict|Counter|ChainMap|Weak\w+(Dictionary|Set)|local|count"
)
MUTATORS = re.compile(
    r"append|extend|insert|remove|pop|popitem|clear|update|setdefault|add|discard|appendleft|extendleft|sort|reverse"
    r"|move_to_end|\w+_update"
)
CONSTANT_NAME = re.compile(r"_*[A-Z][A-Z0-9_]*|__\w+__")
VARIABLE_NAME = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|RANK|PATH|HOME")


def file_length_faults(modules: dict[str, Module]) -> list[str]:
    """Files over their line budget."""
    faults = []
    for module in modules.values():
        limit = MAX_KERNEL_FILE_LINES if module.path in KERNEL_FILES else MAX_FILE_LINES
        if (lines := len(module.source.splitlines())) > limit:
            faults.append(f"{module.path}:{lines}: {lines} lines, at most {limit}")
    return faults


def function_faults(modules: dict[str, Module]) -> list[str]:
    """Functions that are too long or take too many arguments; compiled kernels and op schemas are exempt."""
    faults = []
    for module in modules.values():
        for name, node in _named_functions(module.tree, module.name):
            if KERNEL_DECORATORS & {last_name(decorator) for decorator in node.decorator_list}:
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                faults.append(module.fault(node, f"{node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"))
            if (count := _argument_count(node.args)) > MAX_ARGUMENTS and name not in FIXED_SIGNATURES:
                faults.append(module.fault(node, f"{node.name} has {count} arguments, at most {MAX_ARGUMENTS}"))
    return faults


def _named_functions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function below `tree` with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        name = f"{prefix}.{node.name}" if isinstance(node, (*FUNCTIONS, ast.ClassDef)) else prefix
        if isinstance(node, FUNCTIONS):
            yield name, node
        yield from _named_functions(node, name)


def _argument_count(arguments: ast.arguments) -> int:
    positional = [*arguments.posonlyargs, *arguments.args]
    receiver = bool(positional) and positional[0].arg in ("self", "cls", "ctx")
    variadic = (arguments.vararg is not None) + (arguments.kwarg is not None)
    return len(positional) + len(arguments.kwonlyargs) + variadic - receiver


def environment_faults(modules: dict[str, Module]) -> list[str]:
    """The process environment touched outside core/env.py, by attribute or by `from os import`."""
    names = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")
    faults = []
    for module in modules.values():
        for node in ast.walk(module.tree):
            by_attribute = isinstance(node, ast.Attribute) and last_name(node.value) == "os" and node.attr in names
            from_os = isinstance(node, ast.ImportFrom) and node.module == "os"
            by_import = from_os and any(alias.name in names for alias in node.names)
            if (by_attribute or by_import) and module.name != ENVIRONMENT_READER:
                faults.append(module.fault(node, "only core/env.py reads the environment"))
    return faults


def environment_variables(modules: dict[str, Module]) -> dict[str, str]:
    """Variable -> the first place that names it: `env.get("X")` anywhere, any upper-case text in bootstrap."""
    found: dict[str, str] = {}
    for module in modules.values():
        for node in ast.walk(module.tree):
            if module.name.startswith(BOOTSTRAP) and isinstance(node, ast.Constant):
                name = node.value if isinstance(node.value, str) and VARIABLE_NAME.fullmatch(node.value) else None
            else:
                name = _variable_read(node)
            if name is not None:
                found.setdefault(name, module.fault(node, name))
    return found


def unnamed_variable_faults(modules: dict[str, Module]) -> list[str]:
    """`env.get(name)` with a computed name, which no page could list."""
    return [
        module.fault(node, "env.get needs the variable's name as a literal")
        for module in modules.values()
        for node in ast.walk(module.tree)
        if not module.name.startswith(BOOTSTRAP) and _is_env_get(node) and _variable_read(node) is None
    ]


def _is_env_get(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "get"
        and last_name(node.func.value) in ("env", "environment")
    )


def _variable_read(node: ast.AST) -> str | None:
    """The literal name in `env.get("X")`, `environment().get("X")` or `environment()["X"]`."""
    key: ast.AST | None = None
    if _is_env_get(node) and isinstance(node, ast.Call) and node.args:
        key = node.args[0]
    elif isinstance(node, ast.Subscript) and last_name(node.value) == "environment":
        key = node.slice
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None


def state_faults(modules: dict[str, Module]) -> list[str]:
    """Mutable values that live as long as the process: module or class level, unless a constant that nobody changes."""
    faults = []
    for module in modules.values():
        bodies = [module.tree.body, *(node.body for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef))]
        for statement in (s for body in bodies for s in module_level(body)):
            for name in _mutable_targets(statement):
                if not CONSTANT_NAME.fullmatch(name) and f"{module.name}.{name}" not in REGISTRIES:
                    faults.append(module.fault(statement, f"{name} is mutable state without an owner"))
        faults.extend(
            module.fault(node, f"{name} is a constant and is changed here")
            for node in ast.walk(module.tree)
            for name in _changed_constants(node)
            if name in _module_names(module) and f"{module.name}.{name}" not in REGISTRIES
        )
    return faults


def _mutable_targets(statement: ast.stmt) -> list[str]:
    """The names that `statement` binds to a mutable value; a name annotated Final is a constant."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
        return []
    if isinstance(statement, ast.AnnAssign) and "Final" in ast.unparse(statement.annotation):
        return []
    value = statement.value
    display = isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)
    if not display and not (isinstance(value, ast.Call) and MUTABLE_TYPES.fullmatch(last_name(value))):
        return []
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _changed_constants(node: ast.AST) -> Iterator[str]:
    """Upper-case names that `node` changes in place."""
    changed: list[ast.AST] = []
    if isinstance(node, ast.Assign):
        changed = [target.value for target in node.targets if isinstance(target, ast.Subscript)]
    elif isinstance(node, ast.AugAssign):
        changed = [node.target.value if isinstance(node.target, ast.Subscript) else node.target]
    elif isinstance(node, ast.Delete):
        changed = [target.value for target in node.targets if isinstance(target, ast.Subscript)]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and MUTATORS.fullmatch(node.func.attr):
        changed = [node.func.value]
    for value in changed:
        name = last_name(value) if isinstance(value, ast.Name | ast.Attribute) else ""
        if CONSTANT_NAME.fullmatch(name) and not name.startswith("__"):
            yield name


def _module_names(module: Module) -> set[str]:
    """Names that `module` binds at module or class level or imports; a local of the same spelling is somebody's own."""
    names: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, ast.Module | ast.ClassDef):
            for statement in module_level(node.body):
                targets = getattr(statement, "targets", [getattr(statement, "target", None)])
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def exception_faults(modules: dict[str, Module]) -> list[str]:
    """Handlers that catch everything. `except BaseException` may clean up when its last statement is a bare raise."""
    faults = []
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ExceptHandler):
                kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                names = {last_name(kind) if kind else "bare except" for kind in kinds}
                reraises = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
                broad = names & {"bare except", "Exception"} or (names & {"BaseException"} and not reraises)
            else:
                suppresses = isinstance(node, ast.Call) and last_name(node.func) == "suppress"
                broad = suppresses and {last_name(a) for a in node.args} & {"Exception", "BaseException"}
            if broad:
                faults.append(module.fault(node, "catches every exception; name the ones that are expected"))
    return faults


def global_faults(modules: dict[str, Module]) -> list[str]:
    """`global` statements."""
    return [
        module.fault(node, f"global {', '.join(node.names)}")
        for module in modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Global)
    ]


def docstring_faults(modules: dict[str, Module]) -> list[str]:
    """Modules with code and no docstring."""
    return [
        f"{module.path}:1: no module docstring"
        for module in modules.values()
        if module.tree.body and not ast.get_docstring(module.tree)
    ]


def reference_faults(modules: dict[str, Module]) -> list[str]:
    """Op folders under kernels/ that hold no `_reference.py`."""
    folders = {n for n, m in modules.items() if re.fullmatch(r"moe_runtime/kernels/[a-z]\w*/__init__\.py", m.path)}
    return [f"{modules[n].path}:1: no _reference.py" for n in sorted(folders) if f"{n}._reference" not in modules]
