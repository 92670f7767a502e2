"""Detects the optimizer steps of another library's training loop, counts their tokens, and reports them to the link."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from isthmus.errors import InputError
from isthmus.link import Link
from isthmus.wording import an

MAIN_INPUTS = ("input_ids", "input_values", "input_features", "pixel_values", "inputs_embeds")
"""Arguments of a model's forward. In the first one that is present, the first two dimensions are counted as tokens."""

Count = Callable[[tuple[Any, ...], dict[str, Any]], int]
"""Returns the number of tokens in the arguments of a model's forward: the positional ones and those by name."""


def raw(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer inside a framework's wrappers. Raises `InputError` if there is none."""
    found = optimizer
    while not (isinstance(found, torch.optim.Optimizer) and hasattr(found, "_optimizer_step_post_hooks")):
        found = getattr(found, "optimizer", None)
        if found is None:
            raise InputError(f"{an(type(optimizer).__qualname__)} wraps no torch.optim.Optimizer")
    return found


def require_own_weights(optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    """Raise `InputError` for optimizers whose skipped steps cannot be detected, or that keep their own master weights.

    A fused optimizer under a GradScaler checks for overflow itself, so it is called even for a step that changes
    nothing. An optimizer with its own master weights would overwrite an adopted version with its next step.
    """
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if scaler is not None and any(group.get("fused") for group in optimizer.param_groups):
        raise InputError(
            f"{name} is fused and a GradScaler scales its gradients: a step that it skips cannot be told from one that "
            "it takes; make it with fused=False (in TrainingArguments: optim='adamw_torch'), or train in bf16"
        )
    for kept in ("master_params", "_fp32_params", "fp32_from_fp16_groups", "single_partition_of_fp32_groups"):
        if getattr(optimizer, kept, None):
            raise InputError(
                f"{name} keeps master weights of its own ({kept}): a new global version would be undone by its next "
                "step; use an optimizer that steps the model's parameters, such as torch.optim.AdamW"
            )


def require_whole_batches(model: nn.Module) -> None:
    """Raise `InputError` if ranks of one job read the same batch: its tokens would be counted once for each rank."""
    for name, p in model.named_parameters():
        mesh = getattr(p, "device_mesh", None)
        sizes = {} if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
        if any(sizes.get(dimension, 1) > 1 for dimension in ("tp", "cp")):
            raise InputError(
                f"parameter {name} lies on a mesh with tensor or context parallelism, where ranks read one batch "
                "together: call isthmus.join and link.step(tokens) yourself, with each token once"
            )


class Tokens:
    """Counts the tokens that a model reads while it trains."""

    def __init__(self, model: nn.Module, count: Count | None = None) -> None:
        """`count` returns how many tokens a forward reads; without it, the tokens of the main input are counted."""
        self._names = [n for n in (getattr(model, "main_input_name", None), *MAIN_INPUTS) if isinstance(n, str)]
        self._places = [*inspect.signature(model.forward).parameters]
        self._count = count or self._elements
        self._seen = 0
        self._hook = model.register_forward_pre_hook(self._read, with_kwargs=True)

    def taken(self) -> int:
        """Return the number of tokens since the last call, at least 1."""
        found, self._seen = self._seen, 0
        return max(found, 1)

    def close(self) -> None:
        """Stop counting."""
        self._hook.remove()

    def _read(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training:
            self._seen += self._count(args, kwargs)

    def _elements(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        given = dict(zip(self._places, args, strict=False)) | kwargs
        for name in self._names:
            if isinstance(found := given.get(name), torch.Tensor):
                return found.shape[0] * (found.shape[1] if found.dim() > 1 else 1)
        first = next((x for x in given.values() if isinstance(x, torch.Tensor)), None)
        return 0 if first is None else first.numel()


def kept_of(schedule: Any) -> dict[str, Any]:
    """Return the state of a learning-rate schedule without its functions, which the training script builds again."""
    return {name: value for name, value in schedule.state_dict().items() if name != "lr_lambdas"}


def take_up(schedule: Any, state: dict[str, Any]) -> None:
    """Restore a schedule from the state that `kept_of` returned."""
    schedule.load_state_dict({**schedule.state_dict(), **state})


def figures_of(link: Link) -> dict[str, float]:
    """Return the figures of a run for a framework's loggers; none on a rank that does not speak for the learner."""
    if not link.speaks:
        return {}
    found: dict[str, float] = {"isthmus/steps": link.steps_done, "isthmus/tokens": link.tokens_seen}
    found["isthmus/version"] = min(link.versions)
    if "ledger/merged" in link.figures:
        found["isthmus/merged"] = round(link.figures["ledger/merged"], 4)
    return found


class StepHook:
    """Reports to a link the steps that an optimizer took, and not those that were skipped.

    A GradScaler that finds an overflow, or a wrapper that still accumulates, does not call `step` of the raw optimizer.
    During the warm-up after a start with fresh moments, learning rates are multiplied by `Link.rate` for the step
    alone, so schedules do not see the factor.
    """

    def __init__(
        self, link: Link, model: nn.Module, optimizer: Any, *, count: Count | None = None, now: bool = True
    ) -> None:
        """`now`: report each step as soon as it is taken. Otherwise the caller calls `report` after it."""
        self.link = link
        self.tokens = Tokens(model, count)
        self.loss: float | None = None
        """Loss of the step under way, if the caller states it; the next report takes it."""
        self._taken = 0
        self._rates: list[Any] = []
        stepped = raw(optimizer)
        self._hooks = [stepped.register_step_pre_hook(self._warm), stepped.register_step_post_hook(self._note)]
        self._now = now

    def report(self, loss: float | None = None) -> bool:
        """Report the step taken since the last call; return whether there was one.

        Raises `InputError` if there was more than one.
        """
        if not self._taken:
            return False
        if self._taken > 1:
            raise InputError(f"{self._taken} optimizer steps were taken between two reports: report after each")
        self._taken = 0
        stated, self.loss = self.loss, None
        self.link.step(self.link.of_all_ranks(self.tokens.taken()), loss=stated if loss is None else loss)
        return True

    def close(self, *, done: bool = True) -> None:
        """Remove the hooks from the model and its optimizer, and leave the run."""
        self.let_go()
        self.link.close(done=done)

    def fail(self, error: BaseException) -> None:
        """Leave the run after an error: training is not done, and other ranks may be at another step; see `Link`."""
        self.let_go()
        self.link.__exit__(type(error), error)

    def let_go(self) -> None:
        """Remove the hooks from the model and its optimizer; the link stays open."""
        self.tokens.close()
        for hook in self._hooks:
            hook.remove()

    def _warm(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if (rate := self.link.rate) < 1.0:
            self._rates = [group["lr"] for group in optimizer.param_groups]
            for group, lr in zip(optimizer.param_groups, self._rates, strict=True):
                group["lr"] = lr * rate

    def _note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, lr in zip(optimizer.param_groups, self._rates, strict=False):
            group["lr"] = lr
        self._rates = []
        self._taken += 1
        if self._now:
            self.report()
