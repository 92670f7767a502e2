"""A loop over `accelerate.Accelerator` as a learner: `join(accelerator, RUN, model, optimizer, learner="eu-1", …)`."""

from typing import Any

from accelerate import Accelerator

from isthmus.errors import InputError
from isthmus.integrations.hook import Count, StepHook, raw, require_own_weights, require_whole_batches
from isthmus.link import Link
from isthmus.link import join as _join


class Learner:
    """A prepared model in a run: each `optimizer.step()` that takes a step is reported. Made by `join`."""

    def __init__(self, hook: StepHook) -> None:
        self._hook = hook

    @property
    def link(self) -> Link:
        """The learner's hold on the run: `steps_done`, `rate`, `metrics` and the rest."""
        return self._hook.link

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
    learner: str,
    count: Count | None = None,
    **joining: Any,
) -> Learner:
    """Join a run with what `accelerator.prepare` has returned; the rest is as for `isthmus.join`.

    Tokens are counted where the model reads them (`count` says how many a forward reads), steps where the optimizer
    takes them: not while gradients accumulate, and not where a GradScaler skips one. Of several processes each calls
    this; `fsdp_version: 2` shards a model as Isthmus understands it.

    Raises what `isthmus.join` does, and `InputError` for FSDP1, DeepSpeed, Megatron-LM, tensor and context parallelism,
    and optimizers that keep weights of their own.
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
