"""Small mistakes made at random: every place in a module where a small error leaves valid Python.

The kernels that numba compiles are included. docs/design/dependencies.md says why no library makes these mistakes.
"""

import ast
import random
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

COMPARISONS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: (r"is\s+not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}  # fmt: skip
OPERATORS = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"), ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"), ast.BitXor: ("^", "|"),
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
LOGGERS = {"logger", "_logger"}
SAME_WITHOUT = {"strict", "slots", "frozen", "kw_only", "daemon"}
"""Keywords that only guard against programming mistakes: without them a correct program does the same."""


class Span(NamedTuple):
    """A part of a module's UTF-8 bytes."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, order=True)
class Mistake:
    """A part of a module, and the erroneous text that replaces it."""

    file: str
    """Path below the root of the repository."""
    line: int
    start: int
    end: int
    kind: str
    after: bytes

    def apply(self, source: bytes) -> bytes:
        """Return the module with the mistake."""
        return source[: self.start] + self.after + source[self.end :]

    @property
    def name(self) -> str:
        """The name of the mistake in reports."""
        return f"{self.file}:{self.line} {self.kind}"


class _Finder(ast.NodeVisitor):
    """Collects (span, replacement, kind, line)."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[tuple[Span, bytes, str, int]] = []

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> Span:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return Span(
            self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset
        )

    def text(self, span: Span) -> bytes:
        return self.source[span.start : span.end]

    def add(self, span: Span, after: bytes | str, kind: str, line: int | None = None) -> None:
        if line is None:
            line = self.source.count(b"\n", 0, span.start) + 1
        self.found.append((span, after if isinstance(after, bytes) else after.encode(), kind, line))

    def between(self, left: ast.expr, right: ast.expr, token: str, after: str, kind: str) -> None:
        """Replace the one operator between two expressions."""
        gap = Span(self.span(left).end, self.span(right).start)
        text = re.sub(rb"#.*", lambda m: b" " * len(m[0]), self.text(gap))
        hits = list(re.finditer(token.encode(), text))
        if len(hits) == 1:
            self.add(Span(gap.start + hits[0].start(), gap.start + hits[0].end()), after, kind)

    # --- parts in which no mistake is made ---

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for default in (*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)):
            self.visit(default)
        for statement in node.body:
            self.visit(statement)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Skip asserts: their conditions always hold."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip formatted texts: they are for people."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    # --- statements ---

    def visit_Expr(self, node: ast.Expr) -> None:
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        if not isinstance(value, ast.Call) or self._logs(value):
            return
        self.add(self.span(node), "pass", "a statement is dropped")
        if isinstance(node.value, ast.Await):
            self.add(self.span(node), self.text(self.span(value)), "an await is dropped")
        self.generic_visit(node)

    def _logs(self, call: ast.Call) -> bool:
        return (
            isinstance(call.func, ast.Attribute)
            and isinstance(call.func.value, ast.Name)
            and call.func.value.id in LOGGERS
        )

    def visit_Assign(self, node: ast.Assign) -> None:
        if not all(isinstance(target, ast.Name) for target in node.targets):
            self.add(self.span(node), "pass", "a statement is dropped")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add(self.span(node), "pass", "a statement is dropped")
        if type(node.op) in OPERATORS:
            token, after = OPERATORS[type(node.op)]
            gap = Span(self.span(node.target).end, self.span(node.value).start)
            self.add(gap, self.text(gap).replace(f"{token}=".encode(), f"{after}=".encode()), "another operator")
        self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        self.add(self.span(node), "pass", "a statement is dropped")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add(self.span(node), "pass", "a statement is dropped")

    def visit_Break(self, node: ast.Break) -> None:
        self.add(self.span(node), "continue", "break and continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add(self.span(node), "break", "break and continue")
        self.add(self.span(node), "pass", "a statement is dropped")

    def visit_If(self, node: ast.If) -> None:
        self._test(node.test)
        if isinstance(node.body[-1], ast.Raise | ast.Return | ast.Continue | ast.Break) and not node.orelse:
            self.add(self.span(node.test), "False", "a check is dropped")
        self.generic_visit(node)

    def _test(self, test: ast.expr) -> None:
        if not isinstance(test, ast.Compare | ast.UnaryOp | ast.Constant):  # these get other mistakes
            self.add(self.span(test), b"not (" + self.text(self.span(test)) + b")", "a condition is turned round")

    # --- expressions ---

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, op, right in zip(operands, node.ops, operands[1:], strict=False):
            token, after = COMPARISONS[type(op)]
            self.between(left, right, token, after, "another comparison")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        both = isinstance(node.op, ast.And)
        for left, right in zip(node.values, node.values[1:], strict=False):
            token, after = ("and", "or") if both else ("or", "and")
            self.between(left, right, rf"\b{token}\b", after, "and and or")
        for value in node.values:
            self.add(self.span(value), "True" if both else "False", "a check is dropped")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.add(self.span(node), self.text(self.span(node.operand)), "a condition is turned round")
        elif isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
            self.add(self.span(node), self.text(self.span(node.operand)), "a sign is dropped")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = (ast.JoinedStr, ast.List, ast.Tuple)
        pair = (node.left, node.right)
        text = any(
            isinstance(x, texts) or (isinstance(x, ast.Constant) and isinstance(x.value, str | bytes)) for x in pair
        )
        if type(node.op) in OPERATORS and not text:
            token, after = OPERATORS[type(node.op)]
            self.between(node.left, node.right, re.escape(token), after, "another operator")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        for branch in (node.body, node.orelse):
            self.add(self.span(node), self.text(self.span(branch)), "one branch always")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.add(self.span(node), str(not value), "another constant")
        elif isinstance(value, int):
            self.add(self.span(node), str(value + 1), "another constant")
            if value > 1:
                self.add(self.span(node), str(value - 1), "another constant")
        elif isinstance(value, float):
            self.add(self.span(node), repr(2 * value) if value else "1.0", "another constant")

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.slice, ast.Slice):
            for bound in (node.slice.lower, node.slice.upper):
                if bound is not None:
                    self.add(self.span(bound), "", "a bound of a slice is dropped")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in NAMES:
            self.add(self.span(node.func), NAMES[node.func.id], "min and max, any and all")
        for left, right in zip(node.args, node.args[1:], strict=False):
            a, b = self.span(left), self.span(right)
            starred = isinstance(left, ast.Starred) or isinstance(right, ast.Starred)
            if not starred and self.text(a) != self.text(b):
                gap = self.text(Span(a.end, b.start))
                self.add(Span(a.start, b.end), self.text(b) + gap + self.text(a), "arguments change places")
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in SAME_WITHOUT:
                self._drop_item(self.span(keyword), "an argument is dropped")
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None:
                self._drop_item(Span(self.span(key).start, self.span(value).end), "an item is dropped")
        self.generic_visit(node)

    def _drop_item(self, item: Span, kind: str) -> None:
        """Drop an item with the comma before it, or else with the comma after it."""
        before, behind = self.source[: item.start].rstrip(), self.source[item.end :]
        line = self.source.count(b"\n", 0, item.start) + 1
        if before.endswith(b","):
            self.add(Span(len(before) - 1, item.end), "", kind, line)
        else:
            comma = re.match(rb"\s*,?", behind)
            assert comma is not None
            self.add(Span(item.start, item.end + comma.end()), "", kind, line)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self.add(self.span(condition), "True", "a check is dropped")
        self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if isinstance(node.type, ast.Tuple):
            for kind in node.type.elts:
                others = b", ".join(self.text(self.span(x)) for x in node.type.elts if x is not kind)
                self.add(self.span(node.type), b"(" + others + b",)", "an exception is not caught")
        for statement in node.body:
            self.visit(statement)


def places(file: str, source: bytes, lines: Collection[int] | None = None) -> list[Mistake]:
    """Return every candidate mistake in a module, or in some of its lines. `changes` checks whether one is valid."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    return [
        Mistake(file, line, span.start, span.end, kind, after)
        for span, after, kind, line in finder.found
        if lines is None or line in lines
    ]


def changes(mistake: Mistake, source: bytes) -> bool:
    """Return whether a module with the mistake is valid Python, and a different program."""
    try:
        changed = ast.parse(mistake.apply(source))
        compile(changed, mistake.file, "exec")
    except SyntaxError:
        return False
    return ast.dump(changed) != ast.dump(ast.parse(source))


def sample(found: Iterable[Mistake], sources: Mapping[str, bytes], count: int, seed: int) -> list[Mistake]:
    """Draw `count` mistakes by seed, at most one in each line: first draw the line, then the mistake."""
    draw = random.Random(seed)
    lines: dict[tuple[str, int], list[Mistake]] = {}
    for mistake in found:
        lines.setdefault((mistake.file, mistake.line), []).append(mistake)
    chosen: list[Mistake] = []
    for line in draw.sample(sorted(lines), len(lines)):
        candidates = sorted(lines[line])
        draw.shuffle(candidates)
        chosen += [m for m in candidates if changes(m, sources[m.file])][:1]
        if len(chosen) == count:
            break
    return chosen
