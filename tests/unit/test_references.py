"""Every dotted name and every file in backticks in a docstring exists: renaming leaves no dead reference behind."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ROOT / "pkg", ROOT / "services"

FOREIGN = {
    "accelerator", "asyncio", "dataclasses", "deque", "fma", "lightning", "optimizer", "platform", "random",
    "scheduler", "time", "torch",
}  # fmt: skip
"""First parts of names of other libraries, and of objects that a caller has."""

FOREIGN_NAMES = {"checkpoint.enable", "model.state_dict", "tensor.data"}
"""Names of other libraries whose first part is a name of this one, too."""

FILES = {"md", "py", "safetensors", "toml"}
"""Endings of names of files."""


def bound(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield the names that the statements of a module or a class bind, with the strings of `__slots__`."""
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=targets, value=value):
                yield from (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))
                if any(isinstance(target, ast.Name) and target.id == "__slots__" for target in targets):
                    yield from (str(part.value) for part in ast.walk(value) if isinstance(part, ast.Constant))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name for alias in names)
            case ast.If() | ast.Try():
                yield from bound([*node.body, *node.orelse])
            case _:
                pass


def instance_names(of: ast.ClassDef) -> Iterator[str]:
    """Yield the attributes that a class's methods set on `self`."""
    for node in ast.walk(of):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
            case _:
                pass


class Names:
    """The modules and classes of the sources, with the names in each."""

    def __init__(self) -> None:
        self.modules: dict[str, tuple[Path, ast.Module]] = {}
        for folder in FOLDERS:
            for path in folder.rglob("*.py"):
                parts = path.relative_to(folder).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                self.modules[name] = path, ast.parse(path.read_text())
        self.inside = {name: set(bound(tree.body)) for name, (_, tree) in self.modules.items()}
        self.called: dict[str, list[str]] = {}
        """The modules with each last part of a name."""
        for name in self.modules:
            self.called.setdefault(name.split(".")[-1], []).append(name)
        self.classes: dict[str, set[str]] = {}
        self.bases: dict[str, set[str]] = {}
        for _, tree in self.modules.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self.classes.setdefault(node.name, set()).update(bound(node.body), instance_names(node))
                    bases = (part for base in node.bases for part in ast.walk(base))
                    self.bases.setdefault(node.name, set()).update(ast.unparse(b).split(".")[-1] for b in bases)

    def members(self, name: str) -> set[str]:
        """Return the attributes of a class and of its bases."""
        return self.classes.get(name, set()).union(*(self.members(b) for b in self.bases.get(name, set()) - {name}))

    def in_module(self, module: str, rest: list[str]) -> bool:
        if not rest:
            return True
        if f"{module}.{rest[0]}" in self.modules and self.in_module(f"{module}.{rest[0]}", rest[1:]):
            return True
        known = rest[0] in self.inside[module]
        return known and (len(rest) == 1 or rest[0] not in self.classes or rest[1] in self.members(rest[0]))

    def has(self, dotted: str) -> bool:
        """Return whether a name leads anywhere: from a module, a class, or an object with the name of its class."""
        first, *rest = dotted.split(".")
        if any(self.in_module(module, rest) for module in self.called.get(first, ())):
            return True
        spelt = first.replace("_", "").lower()
        return any(rest[0] in self.members(c) for c in self.classes if c.replace("_", "").lower() == spelt)

    def dead(self, text: str) -> list[str]:
        """Return the dotted names and files in backticks in a text that do not exist."""
        dotted = re.findall(r"`([A-Za-z_]\w*(?:\.\w+)+)(?:\(\))?`", text)
        names = [n for n in dotted if n.split(".")[0] not in FOREIGN and n.rsplit(".")[-1] not in FILES]
        files = re.findall(r"`([\w/]+\.py)`|\b((?:docs|tests)/[\w/]+\.\w+)", text)
        return [n for n in names if n not in FOREIGN_NAMES and not self.has(n)] + [
            name for name in map("".join, files) if not any(p.is_file() for p in self.places(name))
        ]

    def places(self, name: str) -> Iterator[Path]:
        """Yield where a named file may lie: below the repository, or below any package."""
        yield ROOT / name
        yield from (path.parent / name for path, _ in self.modules.values())


@cache
def names() -> Names:
    return Names()


def test_no_docstring_names_what_does_not_exist() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {name}"
        for path, tree in names().modules.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for name in names().dead(node.value.value)
    ]
    assert not wrong, "\n".join(wrong)


def test_a_dead_reference_is_found_and_a_living_one_is_not() -> None:
    dead = ["copies.Copies.follow", "link.follower", "Rounds.accepts", "keeper.Keeper", "log/gate.py", "docs/none.md"]
    text = "`copies.Copies.follow` `link.follower` `Rounds.accepts` `keeper.Keeper` `log/gate.py` docs/none.md"
    assert names().dead(text) == dead
    assert (
        names().dead("`Rounds.take_fetched()` `link.leader` `isthmus.log.verify.Verifier.open` `torch.compile`") == []
    )
