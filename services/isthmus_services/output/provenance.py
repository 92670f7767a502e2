"""What a computed figure depends on: the processor, the versions of libraries, and the source code.

A seed gives the same bits again where all of this is the same. Elsewhere sums are rounded in another order.
"""

import ast
import hashlib
import importlib.util
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path

from isthmus.version import __version__
from isthmus_services.output.copies import SELVES as _SELVES
from isthmus_services.output.copies import folder_of

LIBRARIES = ("torch", "numpy", "numba")

_INSTRUCTIONS = ("avx512f", "avx2", "avx", "asimd")
"""Vector instructions that libraries choose their loops by, the widest first, as Linux names them."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What a figure is reproducible on."""

    cpu: str
    """Model of the processor."""
    instructions: str
    """Its widest vector instructions that libraries use."""
    threads: int
    """Threads that compute one figure."""
    python: str
    libraries: dict[str, str]
    """By name, the version of each of `LIBRARIES` that is installed."""
    computed_by: str
    """The module of Isthmus that computes the figure."""
    source: str
    """Digest of the source code of that module and of all that it imports: 20 hex digits."""
    own_rules: dict[str, str] = field(default_factory=dict)
    """By merge rule MODULE:FUNCTION of one's own: digest [20 hex digits] of the module and all that it imports."""
    isthmus: str = __version__
    revision: str
    """Git revision of the source, with `+` if files differ from it; empty if the source is in no repository."""

    @property
    def line(self) -> str:
        """One line that says all of this."""
        libraries = ", ".join(f"{name} {version}" for name, version in self.libraries.items())
        at = f" at {self.revision}" if self.revision else ""
        own = "".join(f", digest of {rule} with its imports {digest}" for rule, digest in self.own_rules.items())
        return (
            f"reproducible on: {self.cpu} ({self.instructions}), threads: {self.threads}, Python {self.python}, "
            f"{libraries}, isthmus {self.isthmus}{at}, digest of {self.computed_by} with its imports {self.source}{own}"
        )

    @property
    def decisive(self) -> str:
        """All that decides every figure, as a text that is equal where the figures are: without version and revision,
        which may change while the source does not, and without rules of one's own, which decide some figures only."""
        left_out = ("isthmus", "revision", "own_rules")
        return repr({name: value for name, value in asdict(self).items() if name not in left_out})


def provenance(module: str, threads: int, own_rules: Iterable[str] = ()) -> Provenance:
    """Return what figures are reproducible on that this machine computes.

    `module`: the one of Isthmus that computes them. `own_rules`: functions MODULE:FUNCTION of one's own that merge in
    some figures.
    """
    return Provenance(
        cpu=cpu(),
        instructions=os.environ.get("ATEN_CPU_CAPABILITY") or _instructions(),
        threads=threads,
        python=platform.python_version(),
        libraries={name: version for name in LIBRARIES if (version := _version(name))},
        computed_by=module,
        source=source_of(module),
        own_rules={rule: source_of(rule.partition(":")[0]) for rule in own_rules},
        revision=_revision(),
    )


def cpu() -> str:
    """Return the name of the processor's model."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _instructions() -> str:
    flags = (_cpuinfo("flags") or _cpuinfo("Features")).split()
    return next((name for name in _INSTRUCTIONS if name in flags), platform.machine())


def _cpuinfo(field: str) -> str:
    """Return a field of the first processor in /proc/cpuinfo, or an empty text."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field), "")


def _version(name: str) -> str:
    try:
        return installed(name)
    except PackageNotFoundError:
        return ""


def _revision() -> str:
    """Return the revision of the git repository that this file is in, or an empty text if none tracks the file."""
    here = Path(__file__).resolve()

    def git(*words: str) -> str:
        command = ["git", "-C", str(here.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno", ":/") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


# --- source code ------------------------------------------------------------------------------------------------------


def source_of(module: str) -> str:
    """Return the digest [20 hex digits] of the source of an importable module and of all that it imports.

    That is every module in the same folder of modules, at any depth; of installed packages, only modules of the same
    package. The project's own packages count as one, wherever each of them lies: a clone and an installed copy with
    the same contents have the same digest. What a function reads or imports by a computed name is not in it.
    """
    top = module.partition(".")[0]
    if top in _SELVES:
        return digest_of(module, {name: folder for name in _SELVES if (folder := folder_of(name)) is not None})
    spec = importlib.util.find_spec(module)
    assert spec is not None, "the module has been imported"
    origin = Path(spec.origin or "").resolve()
    folder = origin.parents[module.count(".") + (origin.name == "__init__.py")]
    alone = folder.name in ("site-packages", "dist-packages")
    return digest_of(module, {top: folder} if alone else {}, None if alone else folder)


def digest_of(module: str, folders: Mapping[str, Path], others: Path | None = None) -> str:
    """Return the digest [20 hex digits] of a module's file and of the files that it imports, wherever they lie.

    `folders`: by package that is followed, the folder that holds it. `others`: the folder of all other packages but
    the project's own; None: they are not followed.
    """
    digest = hashlib.sha256()
    for name, path in sorted(_imported(module, folders, others).items()):
        digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


def _imported(module: str, folders: Mapping[str, Path], others: Path | None) -> dict[str, Path]:
    """Return the files of a module and of what it imports, by their names below its folder; see `digest_of`."""
    found: dict[str, Path] = {}
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        top = name.partition(".")[0]
        folder = folders.get(top, None if top in _SELVES else others)
        if not name or name in seen or folder is None:
            continue
        seen.add(name)
        whole = folder.joinpath(*name.split("."))
        path = next((p for p in (whole / "__init__.py", Path(f"{whole}.py")) if p.is_file()), None)
        if path is None:
            continue
        found[path.relative_to(folder).as_posix()] = path
        todo += [name.rpartition(".")[0], *_imports(path, name)]
    return found


def _imports(path: Path, name: str) -> Iterator[str]:
    """Yield the modules that a module's file may import, and names in them, which may be modules, too."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names))
