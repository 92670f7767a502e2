"""torchtitan's Trainer, unchanged, as a learner: `with join(trainer, RUN, learner="eu-1"): trainer.train()`.

This module does not import torchtitan. It uses the model, the optimizer, the step function and the state of the trainer
that it is given.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from isthmus.errors import InputError
from isthmus.integrations.hook import (
    Count,
    StepHook,
    kept_of,
    raw,
    require_own_weights,
    require_whole_batches,
    take_up,
)
from isthmus.link import Link
from isthmus.link import join as _join
from isthmus.torch.loop import catch_up


class TrainerProgress:
    """State of a trainer besides model and optimizer: its step, its schedules, and its position in the data."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.came_back = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        trainer = self._trainer
        return {
            "trainer": trainer.state_dict(),
            "schedules": [kept_of(schedule) for schedule in trainer.lr_schedulers.schedulers],
            "data": trainer.dataloader.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state."""
        trainer, self.came_back = self._trainer, True
        trainer.load_state_dict(state_dict["trainer"])
        for schedule, state in zip(trainer.lr_schedulers.schedulers, state_dict["schedules"], strict=True):
            take_up(schedule, state)
        trainer.dataloader.load_state_dict(state_dict["data"])


@contextmanager
def join(
    trainer: Any, run: str, *, learner: str | None = None, count: Count | None = None, **joining: Any
) -> Iterator[Link]:
    """Join a run with a torchtitan Trainer that was built and has not trained; leave when the block ends.

    Each training step is reported when it is done, with its loss if torchtitan logs that step. Every rank of the job
    calls this function alike. A restart under the same name continues from the learner's own checkpoint, so
    torchtitan's checkpoints have to be off (`checkpoint.enable` false, its default). The other arguments are those of
    `isthmus.join`, except `data` and `steps`, which come from the trainer.

    Raises what `isthmus.join` raises, and `InputError` for pipeline, tensor and context parallelism, and if
    torchtitan's checkpoints are on.
    """
    configuration = getattr(trainer, "config", None) or trainer.job_config
    if configuration.checkpoint.enable:
        raise InputError(
            "torchtitan's checkpoints are on, and a loaded checkpoint would be sent as this learner's work: switch "
            "them off "
            "(checkpoint.enable); the run keeps this learner's own, and isthmus export --dcp writes the global model"
        )
    if len(trainer.model_parts) != 1 or len(trainer.optimizers.optimizers) != 1:
        raise InputError(
            f"torchtitan has cut the model into {len(trainer.model_parts)} parts with "
            f"{len(trainer.optimizers.optimizers)} optimizers: a learner holds one model (no pipeline parallelism)"
        )
    (model,), (given,) = trainer.model_parts, trainer.optimizers.optimizers
    optimizer = raw(given)
    require_whole_batches(model)
    require_own_weights(optimizer, None)
    steps = int(configuration.training.steps)
    own_step: Callable[..., Any] = trainer.train_step
    kept = TrainerProgress(trainer)
    with _join(run, model, optimizer, learner=learner, data=kept, steps=steps, **joining) as link:
        # The trainer counts a step when it begins, so its saved count may include a step that was not finished.
        trainer.step = link.steps_done
        # If another number of ranks wrote the checkpoint, the trainer's state was not restored: its data begins anew.
        if link.steps_done and not kept.came_back:
            for schedule in trainer.lr_schedulers.schedulers:
                catch_up(schedule, link.steps_done)
        hook = StepHook(link, model, optimizer, count=count, now=False)

        metrics, losses = trainer.metrics_processor, list[float]()
        own_log: Callable[..., Any] = metrics.log

        def log(step: int, global_avg_loss: float, *arguments: Any, **named: Any) -> Any:
            losses.append(float(global_avg_loss))
            return own_log(step, global_avg_loss, *arguments, **named)

        def train_step(*arguments: Any, **named: Any) -> Any:
            losses.clear()
            found = own_step(*arguments, **named)
            hook.report(losses[-1] if losses else None)
            return found

        trainer.train_step, metrics.log = train_step, log
        try:
            yield link
        finally:
            trainer.train_step, metrics.log = own_step, own_log
            hook.let_go()
