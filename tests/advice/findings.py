"""The sentences that the doctor can print, read from the syntax tree of its code."""

import ast
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

DOCTOR = Path(__file__).parents[2] / "pkg/isthmus/doctor"
GAP = "\0"
"""Stands in a sentence for what varies."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Sentence:
    """What a call of `Finding` can print. Texts have a `GAP` for what varies."""

    where: str
    check: str
    said: frozenset[str]
    """The sentences, one of which is printed."""
    advice: frozenset[str]
    """What may be printed below it."""

    def says(self, text: str, given: Iterable[str]) -> bool:
        """Return whether one of the given texts is what this can print with one of its sentences."""
        return fits_any(f"{self.check}: {text}", given)


class Reader:
    """Finds out which texts an expression of a module can have."""

    def __init__(self, module: ast.Module, advice: Mapping[str, frozenset[str]]) -> None:
        self.functions = {f.name: f for f in ast.walk(module) if isinstance(f, Function)}
        self.advice = advice
        """What each field of `Advice`, and each constant beside the class, says."""

    def texts(self, node: ast.expr | None, function: Function) -> frozenset[str]:
        """Return the texts of an expression in a function; `GAP` if nothing is known of it."""
        match node:
            case None:
                return frozenset([GAP])
            case ast.Constant(value=str(text)):
                return frozenset([text])
            case ast.FormattedValue(value=value):
                return self.texts(value, function) if isinstance(value, ast.IfExp) else frozenset([GAP])
            case ast.JoinedStr(values=parts):
                return self._joined(parts, function)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._joined([left, right], function)
            case ast.IfExp(body=one, orelse=other):
                return self.texts(one, function) | self.texts(other, function)
            case ast.BoolOp(values=values):
                return frozenset().union(*(self.texts(value, function) for value in values)) - {""}
            case ast.Attribute(attr=name) if name in self.advice:
                return self.advice[name]
            case ast.Name(id=name):
                return self.advice[name] if name in self.advice else self._named(node, function)
            case ast.Call(func=ast.Attribute(value=value, attr="format")):
                return self.texts(value, function)
            case ast.Call(func=ast.Name(id="what_to_do"), args=args):
                told = [self.texts(one, function) for one in args[2:]]
                return frozenset().union(*told, *(self.advice[name] for name in ("LINK", "CLOCK", "BUCKET", "full")))
            case ast.Call(func=ast.Name(id=name)) if name in self.functions:
                called = self.functions[name]
                returned = [r.value for r in ast.walk(called) if isinstance(r, ast.Return)]
                return frozenset().union(*(self.texts(value, called) for value in returned)) - {""}
        return frozenset([GAP])

    def _joined(self, parts: Iterable[ast.expr | None], function: Function) -> frozenset[str]:
        every = [self.texts(part, function) for part in parts]
        return frozenset(_tidy("".join(chosen)) for chosen in itertools.product(*every))

    def _named(self, use: ast.Name, function: Function) -> frozenset[str]:
        """Return what was last assigned to a name before it is used, with what was appended to it since."""
        found = frozenset([GAP])
        nodes = [node for node in ast.walk(function) if isinstance(node, ast.Assign | ast.AugAssign | ast.NamedExpr)]
        for node in sorted(nodes, key=lambda node: node.lineno):
            if node.lineno >= use.lineno:
                break
            for target, value in _assigned(node):
                if isinstance(target, ast.Name) and target.id == use.id:
                    told = self.texts(value, function)
                    more = isinstance(node, ast.AugAssign)
                    found = frozenset(_tidy(a + b) for a in found for b in told) if more else told
        return found


def _tidy(text: str) -> str:
    return re.sub(f"{GAP}+", GAP, text)


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
            yield from zip(names, values, strict=True)
        case ast.Assign(
            targets=[ast.Tuple(elts=names)], value=ast.IfExp(body=ast.Tuple(elts=a), orelse=ast.Tuple(elts=b))
        ):
            yield from itertools.chain(zip(names, a, strict=True), zip(names, b, strict=True))
        case ast.Assign(targets=[ast.Tuple(elts=names)]):
            yield from ((name, None) for name in names)
        case ast.Assign(targets=[target], value=value) | ast.AugAssign(target=target, value=value):
            yield target, value
        case ast.NamedExpr(target=target, value=value):
            yield target, value


def advice() -> dict[str, frozenset[str]]:
    """Return what each field of `Advice` says of any kind of store, and each constant of its module.

    The commands are those of a run without keys.
    """
    from isthmus.doctor import advice as module

    tables = [vars(value) for value in vars(module).values() if isinstance(value, module.Advice)]
    found = {name: frozenset(t[name] for t in tables if t[name]) for name in module.Advice.__annotations__}
    found |= {
        name: frozenset([text]) for name, text in vars(module).items() if name.isupper() and isinstance(text, str)
    }
    return {
        name: frozenset(re.sub(r"\{\w+\}", GAP, text.replace("{key}", "")) for text in texts)
        for name, texts in found.items()
    }


def sentences() -> list[Sentence]:
    """Return the sentences of every `Finding` of the doctor that is not certain to say that something is well."""
    found, known = [], advice()
    for path in sorted(DOCTOR.glob("*.py")):
        module = ast.parse(path.read_text())
        reader = Reader(module, known)
        for function in reader.functions.values():
            for call in ast.walk(function):
                if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Finding"):
                    continue
                check, outcome, *others = call.args
                if isinstance(outcome, ast.Name) and outcome.id == "OK":
                    continue
                said, told = [*(reader.texts(one, function) for one in others), frozenset([GAP])][:2]
                checks = reader.texts(check, function)
                where = f"{path.name}:{call.lineno}"
                found.append(Sentence(where, next(iter(checks)) if len(checks) == 1 else GAP, said, told))
    return found


def fits_any(text: str, given: Iterable[str]) -> bool:
    """Return whether one of the given texts is what a text with gaps can be."""
    fits = re.compile(".+?".join(map(re.escape, text.split(GAP))))
    return any(fits.fullmatch(one) for one in given)
