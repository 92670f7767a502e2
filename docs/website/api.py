"""The Python reference: which modules are public, and on which page each is."""

PUBLIC = {
    "reference/python/isthmus.md": (
        "Python",
        "What a training loop calls. `import isthmus` loads neither torch nor a client library; `isthmus.join`, "
        "`isthmus.Link`, `isthmus.follow`, `isthmus.Following`, `isthmus.Rules` and `isthmus.Pace` are the names "
        "below, resolved when they are first used.",
        (
            "isthmus.link.joining",
            "isthmus.link.link",
            "isthmus.link.following",
            "isthmus.learner.summary",
            "isthmus.torch.random_state",
            "isthmus.format.rules",
            "isthmus.errors",
            "isthmus.reasons",
            "isthmus.sinks",
            "isthmus.demo.trainer",
            "isthmus.demo.gpt",
        ),
    ),
    "reference/python/integrations.md": (
        "Integrations",
        "Training loops of other libraries: see [frameworks](../../frameworks.md).",
        tuple(
            f"isthmus.integrations.{name}" for name in ("transformers", "accelerate", "lightning", "torchtitan", "hook")
        ),
    ),
    "reference/python/readers.md": (
        "Readers",
        "Who takes no part in a run and reads it: what `isthmus replay`, `explain`, `export`, `follow`, `status` and "
        "`board` are made of. A log is opened by [`isthmus.agent.ports.open_log`][].",
        tuple(
            f"isthmus.inspect.{name}"
            for name in (
                "replay",
                "whatif",
                "explain",
                "trace",
                "export",
                "follow",
                "status",
                "bus_view",
                "health_summary",
                "persistence",
            )
        ),
    ),
    "reference/python/ports.md": (
        "Ports and records",
        "The ways to a run, and its objects as Python sees them; as bytes they are in [record formats](../records.md).",
        (
            "isthmus.agent.ports",
            "isthmus.format.permissions",
            "isthmus.log.evaluations",
            "isthmus.runtime.metrics",
            "isthmus.format.records.frame",
            "isthmus.format.records.objects",
            "isthmus.format.records.messages",
            "isthmus.format.records.fields",
            "isthmus.format.records.keys",
            "isthmus.format.records.tree",
        ),
    ),
}
"""By page: title, first paragraph, modules."""

HIDDEN = {"logger", "T"}
"""Names that are nobody's business; zensical.toml has them too."""

MODULES = tuple(module for _, _, modules in PUBLIC.values() for module in modules)


def pages() -> dict[str, str]:
    """Return the pages, for mkdocstrings to fill."""
    return {
        path: f"# {title}\n\n{text}\n\n" + "\n".join(f"::: {module}\n" for module in modules)
        for path, (title, text, modules) in PUBLIC.items()
    }
