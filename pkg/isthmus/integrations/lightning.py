"""`lightning.pytorch.Trainer` as a learner: `Trainer(callbacks=[IsthmusCallback(RUN, learner="eu-1", …)])`."""

import logging
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch import nn

from isthmus.errors import InputError
from isthmus.integrations.hook import (
    Count,
    StepHook,
    figures_of,
    kept_of,
    raw,
    require_own_weights,
    require_whole_batches,
    take_up,
)
from isthmus.link import Link, join
from isthmus.link.joining import learner_name
from isthmus.torch.loop import catch_up

logger = logging.getLogger(__name__)


class TrainerProgress:
    """State of a Trainer besides model and optimizer: its loops, their data loaders if those have state, and the
    schedules."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.came_back = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        schedules = [kept_of(config.scheduler) for config in self._trainer.lr_scheduler_configs]
        return {"fit_loop": self._trainer.fit_loop.state_dict(), "schedules": schedules}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.came_back = True
        self._trainer.fit_loop.load_state_dict(state_dict["fit_loop"])
        for config, schedule in zip(self._trainer.lr_scheduler_configs, state_dict["schedules"], strict=True):
            take_up(config.scheduler, schedule)


class IsthmusCallback(Callback):  # type: ignore[misc]
    """A callback that makes a Trainer's `fit` a learner of a run.

    The learner joins when fitting starts, after the strategy has wrapped the module and made its optimizer. Every
    optimizer step that was taken is reported after its batch. The learner leaves when training ends.

    A restart under the same name continues from the learner's own checkpoint. This restores weights with local work,
    moments, schedules, the Trainer's counters, and the position in a loader that has state (`StatefulDataLoader`).
    Other loaders begin the epoch anew and read as many batches as were left in it. Do not give a `ckpt_path` then.

    The Trainer's own checkpoints hold this learner's replica. `isthmus export RUN` writes the global model.
    """

    def __init__(
        self,
        run: str,
        *,
        learner: str | None = None,
        module: Callable[[LightningModule], nn.Module] | None = None,
        count: Count | None = None,
        **joining: Any,
    ) -> None:
        """Take the arguments of `isthmus.join`, except `data`, which comes from the Trainer.

        `module` returns the part of the LightningModule that is the run's model (`lambda pl: pl.net`), so that its
        parameters have the same names as in loops without Lightning. Without it, the whole LightningModule is the
        model. `count` returns how many tokens a forward reads; without it, the tokens of the main input are counted.
        """
        if "data" in joining:
            raise InputError("the Trainer sets data= itself: leave it out")
        self._run, self._learner, self._joining = run, learner_name(learner), joining
        self._module, self._count = module, count
        self._hook: StepHook | None = None

    @property
    def link(self) -> Link:
        """The learner's link to the run, while the Trainer fits. Raises `InputError` before and after."""
        if self._hook is None:
            raise InputError("there is no link before fitting has begun, nor after it has ended")
        return self._hook.link

    # --- called by the Trainer ----------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the run."""
        if isinstance(trainer.strategy, DeepSpeedStrategy | FSDPStrategy):
            raise InputError(
                f"{type(trainer.strategy).__name__} keeps weights in a form that is not known: train with DDP, or "
                "shard with FSDP2 (ModelParallelStrategy, fully_shard in configure_model)"
            )
        if len(trainer.optimizers) != 1:
            raise InputError(f"the module has {len(trainer.optimizers)} optimizers: a learner has one")
        model = trainer.strategy.model
        assert model is not None, "a strategy has wrapped the module by now"
        read: nn.Module = pl_module
        if self._module is not None:
            if isinstance(model, nn.parallel.DistributedDataParallel) and trainer.world_size > 1:
                raise InputError("module= names a part of what DDP replicates: leave it out, or train with one process")
            model = read = self._module(pl_module)
        require_whole_batches(model)
        optimizer = raw(trainer.optimizers[0])
        require_own_weights(optimizer, getattr(trainer.precision_plugin, "scaler", None))
        kept = TrainerProgress(trainer)
        joining: dict[str, Any] = {"steps": max(trainer.max_steps, 0)} | self._joining
        link = join(self._run, model, optimizer, learner=self._learner, data=kept, **joining)
        if link.steps_done and trainer.ckpt_path is not None:
            link.close(done=False)
            raise InputError(
                f"ckpt_path makes the Trainer load a checkpoint of its own, but {self._learner} has one of step "
                f"{link.steps_done} in {self._run}: resume without ckpt_path"
            )
        if link.steps_done and not kept.came_back:
            # Another number of ranks wrote the checkpoint, so no counters were restored: derive them from the steps.
            logger.warning("%d ranks do not know their place in the data: the data starts anew", trainer.world_size)
            progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
            progress.ready = progress.completed = link.steps_done
            for config in trainer.lr_scheduler_configs:
                catch_up(config.scheduler, link.steps_done if config.interval == "step" else 0)
        self._hook = StepHook(link, read, optimizer, count=self._count, now=False)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report the optimizer step if this batch ended with one. Schedules and counters have already advanced."""
        assert self._hook is not None, "fitting has begun"
        due = trainer.global_step % trainer.log_every_n_steps == 0
        # Reading a loss waits for the device: only when the Trainer logs, too.
        given = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self._hook.report(float(given) if due and given is not None else None) and due:
            for shown in trainer.loggers if self.link.speaks else ():
                shown.log_metrics(figures_of(self.link), step=trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the run."""
        if self._hook is not None:
            hook, self._hook = self._hook, None
            hook.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the run; training is not done."""
        if self._hook is not None:
            hook, self._hook = self._hook, None
            hook.fail(exception)
