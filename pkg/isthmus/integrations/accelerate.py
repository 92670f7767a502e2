"""A loop over `accelerate.Accelerator` as a learner: `join(accelerator, RUN, model, optimizer, learner="eu-1", …)`."""

from typing import Any

from accelerate import Accelerator

from isthmus.errors import InputError
from isthmus.integrations.hook import Count, StepHook, raw, require_own_weights, require_whole_batches
from isthmus.link import Link
from isthmus.link import join as _join


class Learner:
    """A prepared model in a run. It reports each `optimizer.step()` that takes a step. Made by `join`."""

    def __init__(self, hook: StepHook) -> None:
        self._hook = hook

    @property
    def link(self) -> Link:
        """The learner's link to the run, with `steps_done`, `rate`, `metrics` and the rest."""
        return self._hook.link

    def loss(self, loss: float) -> None:
        """State the loss of the step under way, before `optimizer.step()`. Reading a loss waits for the device, so do
        it as often as the loop reads it anyway."""
        self._hook.loss = loss

    def close(self, *, done: bool = True) -> None:
        """Leave the run; see `Link.close`."""
        self._hook.close(done=done)

    def __enter__(self) -> "Learner":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if error is None:
            self.close()
        else:
            self._hook.fail(error)


def join(
    accelerator: Accelerator,
    run: str,
    model: Any,
    optimizer: Any,
    *,
    learner: str | None = None,
    count: Count | None = None,
    **joining: Any,
) -> Learner:
    """Join a run with the model and the optimizer that `accelerator.prepare` returned.

    The other arguments are those of `isthmus.join`. Tokens are counted where the model reads them; `count` returns how
    many tokens a forward reads. Steps are counted where the optimizer takes them. No step is counted while gradients
    accumulate, or when a GradScaler skips a step. Every process of a job calls this function. To shard the model, use
    FSDP2 (`fsdp_version: 2`).

    Raises what `isthmus.join` raises, and `InputError` for FSDP1, DeepSpeed, Megatron-LM, tensor and context
    parallelism, and optimizers that keep their own master weights.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        raise InputError(
            f"accelerate trains with {kind}, which keeps weights of its own in a form that is not known: train with "
            "DistributedDataParallel or FSDP2 (fsdp_version: 2)"
        )
    if kind == "FSDP" and getattr(accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2:
        raise InputError("accelerate shards with FSDP1, its default: set fsdp_version: 2 (or FSDP_VERSION=2)")
    plain = raw(optimizer)
    require_whole_batches(model)
    require_own_weights(plain, getattr(optimizer, "scaler", None))
    link = _join(run, model, plain, learner=learner, **joining)
    return Learner(StepHook(link, model, plain, count=count))
