"""Which copy of the project's code runs, where the current folder holds another one."""

import importlib.util
from pathlib import Path

SELVES = ("isthmus", "isthmus_lab", "isthmus_services")
"""The project's own packages."""

_PLACES = (".", "pkg", "services")
"""Where a clone, or a folder of installed packages, holds them."""


def folder_of(package: str) -> Path | None:
    """Return the folder that holds an importable package; None: there is none."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).resolve().parents[1] if spec is not None and spec.origin else None


def which_runs(folder: Path) -> str:
    """Return which code runs, in one line, if this folder or one above it holds another version; else an empty text."""
    others: dict[str, Path] = {}
    running: dict[str, Path] = {}
    for name in SELVES:
        if (mine := folder_of(name)) is None:
            continue
        for above in (folder, *folder.parents):
            held = [(above / place).resolve() for place in _PLACES]
            if there := next((p for p in held if (p / name / "__init__.py").is_file()), None):
                if there != mine:
                    others[name], running[name] = there, mine
                break
    if all(_contents(others[name] / name) == _contents(running[name] / name) for name in others):
        return ""
    places = dict.fromkeys(map(str, others.values()))
    return (
        f"the code that runs is in {', '.join(dict.fromkeys(map(str, running.values())))}; the copy in "
        f"{', '.join(places)}, which differs, is not used: PYTHONPATH={':'.join(places)} runs it"
    )


def _contents(package: Path) -> dict[str, bytes]:
    """Return the contents of a package's sources and tables, by name."""
    files = (path for ending in ("py", "toml") for path in package.rglob(f"*.{ending}"))
    return {path.relative_to(package).as_posix(): path.read_bytes() for path in files}
