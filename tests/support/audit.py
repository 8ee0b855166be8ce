"""Reads source for what has no place in it: code made from data, shells, formats that run what they load."""

import ast
from collections.abc import Iterator
from pathlib import Path

_MODULES = frozenset("cPickle cloudpickle dill joblib jsonpickle marshal pickle shelve telnetlib".split())
"""What they load may be a program."""

_CALLS = {
    "eval": "runs text as code",
    "exec": "runs text as code",
    "compile": "makes code of text",
    "__import__": "imports what a text names",
    "input": "waits for a person",
    "os.system": "runs a shell",
    "os.popen": "runs a shell",
    "subprocess.getoutput": "runs a shell",
    "subprocess.getstatusoutput": "runs a shell",
    "tempfile.mktemp": "names a file that somebody else may make first",
    "ssl._create_unverified_context": "trusts anybody",
    "yaml.unsafe_load": "runs what it loads",
    "yaml.full_load": "makes objects of what it loads",
    "yaml.load_all": "makes objects of what it loads",
    "torch.hub.load": "runs what it fetches",
}
_KEYWORDS = {
    "shell": "runs a shell",
    "allow_pickle": "loads pickles",
    "trust_remote_code": "runs code of a model's files",
}
_FALSE_KEYWORDS = {"verify": "trusts anybody", "check_hostname": "trusts anybody"}
_SQL_CALLS = frozenset({"execute", "executemany", "executescript"})
_SQL_WORDS = ("SELECT ", "INSERT ", "UPDATE ", "DELETE ", "CREATE ", "DROP ")


def problems(source: str) -> list[str]:
    """Returns what a file must not do, each with its line."""
    tree = ast.parse(source)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt | ast.expr)]
    found = [(node.lineno, problem) for node in nodes for problem in _problems_of(node, tree)]
    return [f"line {line}: {problem}" for line, problem in sorted(found)]


def imported_by_name(source: str) -> bool:
    """Whether a file imports modules whose names it is told."""
    return any(
        isinstance(node, ast.Call) and _name_of(node.func).endswith("import_module")
        for node in ast.walk(ast.parse(source))
    )


def puts_sql_together(source: str) -> bool:
    """Whether a file has SQL whose text is made of pieces."""
    formatted = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.JoinedStr) and node.values]
    firsts = [node.values[0] for node in formatted]
    return any(isinstance(first, ast.Constant) and str(first.value).startswith(_SQL_WORDS) for first in firsts)


def problems_of_files(files: list[Path]) -> dict[str, list[str]]:
    """Returns the problems of each file that has some."""
    found = {str(path): problems(path.read_text()) for path in files}
    return {path: lines for path, lines in found.items() if lines}


def _problems_of(node: ast.AST, tree: ast.Module) -> Iterator[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        for name in names:
            if name.partition(".")[0] in _MODULES:
                yield f"imports {name}: what it loads may be a program"
    elif isinstance(node, ast.Call):
        yield from _problems_of_call(node, tree)


def _problems_of_call(call: ast.Call, tree: ast.Module) -> Iterator[str]:
    name = _name_of(call.func)
    if name in _CALLS:
        yield f"{name}() {_CALLS[name]}"
    if name == "yaml.load" and not _loads_safely(call, tree):
        yield "yaml.load() without a SafeLoader makes objects of what it loads"
    if name == "torch.load" and _keyword(call, "weights_only") is not True:
        yield "torch.load() without weights_only=True runs what it loads"
    for keyword, why in _KEYWORDS.items():
        if _keyword(call, keyword) not in (None, False):
            yield f"{keyword}= in {name or 'a call'}() {why}"
    for keyword, why in _FALSE_KEYWORDS.items():
        if _keyword(call, keyword) is False:
            yield f"{keyword}=False in {name or 'a call'}() {why}"
    if name.rpartition(".")[2] in _SQL_CALLS and call.args and _is_put_together(call.args[0]):
        yield f"{name}() with a text that was put together: give values as parameters"


def _name_of(function: ast.expr) -> str:
    """Returns the dotted name of what is called; a method of a value that has no name keeps its own."""
    if isinstance(function, ast.Name):
        return function.id
    if isinstance(function, ast.Attribute):
        owner = _name_of(function.value)
        return f"{owner}.{function.attr}" if owner else f".{function.attr}"
    return ""


def _keyword(call: ast.Call, name: str) -> object:
    """Returns the constant that a keyword is given; None when it is not given; a text when it is no constant."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value.value if isinstance(keyword.value, ast.Constant) else "computed"
    return None


def _is_put_together(text: ast.expr) -> bool:
    is_formatted = isinstance(text, ast.Call) and _name_of(text.func).endswith(".format")
    return isinstance(text, ast.JoinedStr | ast.BinOp) or is_formatted


def _loads_safely(call: ast.Call, tree: ast.Module) -> bool:
    loaders = [*call.args[1:], *(keyword.value for keyword in call.keywords if keyword.arg == "Loader")]
    names = {_name_of(loader).rpartition(".")[2] for loader in loaders}
    return bool(names) and all(name in ("SafeLoader", "CSafeLoader") or _is_safe_class(name, tree) for name in names)


def _is_safe_class(name: str, tree: ast.Module) -> bool:
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    bases = {_name_of(base).rpartition(".")[2] for node in classes for base in node.bases}
    return bool(bases) and bases <= {"SafeLoader", "CSafeLoader"}
