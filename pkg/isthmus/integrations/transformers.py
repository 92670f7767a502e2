"""`transformers.Trainer` as a learner: `trainer = IsthmusCallback(RUN, learner="eu-1", …).into(Trainer(…))`."""

import logging
import sys
from functools import wraps
from math import ceil
from typing import Any

import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from isthmus.errors import InputError, Unavailable
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
from isthmus.link.following import follow
from isthmus.link.joining import learner_name
from isthmus.torch.loop import catch_up
from isthmus.torch.shard_transfer import is_sharded

logger = logging.getLogger(__name__)

SAVE_S = 600.0
"""Seconds to wait, after training, for the newest global version that `save` writes."""


class TrainerProgress:
    """State of a Trainer besides model and optimizer: its step count and its schedule."""

    def __init__(self, state: TrainerState, scheduler: Any) -> None:
        self._state, self._scheduler = state, scheduler
        self.came_back = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {"global_step": int(self._state.global_step), "scheduler": kept_of(self._scheduler)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.came_back = True
        self._state.global_step = int(state_dict["global_step"])
        take_up(self._scheduler, state_dict["scheduler"])


class IsthmusCallback(TrainerCallback):  # type: ignore[misc]
    """A callback that makes each call of a Trainer's `train` a learner of a run.

    The learner joins when training begins, after the Trainer has wrapped the model and made its optimizer. Every
    optimizer step that was taken is reported. The learner leaves when training ends.

    A restart under the same name continues from the learner's own checkpoint. This restores weights with local work,
    moments, the schedule, `global_step`, and the position in the data: earlier batches are drawn and skipped. Do not
    give `resume_from_checkpoint` then.

    The Trainer's own checkpoints hold this learner's replica. `isthmus export RUN` writes the global model.
    """

    def __init__(
        self,
        run: str,
        *,
        learner: str | None = None,
        count: Count | None = None,
        save: str | None = None,
        **joining: Any,
    ) -> None:
        """Take the arguments of `isthmus.join`, except `steps` and `data`, which come from the Trainer.

        `count` returns how many tokens a forward reads; without it, the tokens of the main input are counted. `save`
        names a folder. When training ends, the model is brought to the newest global version and the Trainer saves it
        there in its usual way (for a model with adapters, only those). `save` requires `into`, and a model that is not
        sharded.
        """
        for taken in ("steps", "data"):
            if taken in joining:
                raise InputError(f"the Trainer sets {taken}= itself: leave it out")
        self._run, self._learner, self._count, self._joining = run, learner_name(learner), count, joining
        self._save = save
        self._trainer: Any = None
        self._hook: StepHook | None = None
        self._loss: float | None = None
        self._ahead: _Ahead | None = None

    def into(self, trainer: Trainer) -> Trainer:
        """Put this callback first in `trainer`, so that the Trainer's loggers get the run's figures; return `trainer`.

        A Trainer does not tell its callbacks of errors. So `train` is wrapped: if it raises, the learner leaves.
        """
        self._trainer = trainer
        trainer.callback_handler.callbacks.insert(0, self)
        own = trainer.train

        @wraps(own)
        def train(*arguments: Any, **named: Any) -> Any:
            try:
                return own(*arguments, **named)
            except BaseException as error:
                if self._hook is not None:
                    hook, self._hook = self._hook, None
                    hook.fail(error)
                raise

        trainer.train = train
        return trainer

    @property
    def link(self) -> Link:
        """The learner's link to the run, while it trains. Raises `InputError` before and after."""
        if self._hook is None:
            raise InputError("there is no link before training has begun, nor after it has ended")
        return self._hook.link

    # --- called by the Trainer ----------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Join the run. Raises `InputError` for a Trainer that cannot be a learner as it is set up."""
        if self._hook is not None:  # an earlier call of `train` failed
            hook, self._hook = self._hook, None
            hook.close(done=False)
        if args.load_best_model_at_end:
            raise InputError(
                "load_best_model_at_end puts earlier weights into the model, which would be sent as this learner's "
                "work: leave it out; every version of the global model can be exported (isthmus export --version)"
            )
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > args.world_size:
            raise InputError(
                f"this is one of {dist.get_world_size()} processes of a job, and the Trainer sees {args.world_size}: "
                "each would join by itself under one name; on CPUs say TrainingArguments(use_cpu=True)"
            )
        if self._trainer is None and args.world_size > 1:
            raise InputError(
                f"{args.world_size} processes train together: say IsthmusCallback(…).into(trainer), through which the "
                "wrapped model is seen"
            )
        if self._save is not None and (self._trainer is None or any(map(is_sharded, given["model"].parameters()))):
            raise InputError(
                "save= is for IsthmusCallback(…).into(trainer), and a model that is whole on each process: "
                "isthmus export RUN --hf DIR writes the global model of any run"
            )
        require_whole_batches(given["model"])
        model = given["model"] if self._trainer is None else self._trainer.model_wrapped
        optimizer, scheduler, loader = raw(given["optimizer"]), given["lr_scheduler"], given["train_dataloader"]
        require_own_weights(optimizer, getattr(given["optimizer"], "scaler", None))
        self._ahead = None
        resumed = state.global_step
        kept = TrainerProgress(state, scheduler)
        joining: dict[str, Any] = {"steps": max(state.max_steps, 0)} | self._joining
        link = join(self._run, model, optimizer, learner=self._learner, data=kept, **joining)
        done = link.steps_done
        if resumed and done and state.global_step != resumed:
            link.close(done=False)
            raise InputError(
                f"resume_from_checkpoint brought the Trainer to step {resumed}, and {self._learner} has its own "
                f"checkpoint of step {state.global_step or done} in {self._run}: resume without resume_from_checkpoint"
            )
        if done and not kept.came_back:
            state.global_step = done  # another number of ranks wrote the checkpoint, so the state was not restored
            catch_up(scheduler, done)
        if state.global_step != resumed:
            self._ahead = _Ahead(loader, state.global_step, args.gradient_accumulation_steps, state.max_steps)
            if self._trainer is not None:
                # The Trainer averages over the steps since these counts, and has already set them to the old step.
                self._trainer._initial_global_step = self._trainer._globalstep_last_logged = state.global_step
        self._hook = StepHook(link, given["model"], optimizer, count=self._count, now=False)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Continue at the learner's position in the data."""
        if self._ahead is not None:
            self._ahead.begin_epoch()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Report the step if it was taken. Schedule and counters have already advanced."""
        assert self._hook is not None, "training has begun"
        self._hook.report(self._loss)
        self._loss = None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **given: Any,
    ) -> None:
        """Add the run's figures to the Trainer's own."""
        if logs is not None and self._hook is not None:
            if "loss" in logs:  # the Trainer logs after a step: the next report brings it
                self._loss = float(logs["loss"])
            logs.update(figures_of(self.link))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Leave the run."""
        if self._hook is not None:
            hook, self._hook = self._hook, None
            hook.close(done=state.global_step >= state.max_steps)
            if self._save is not None and hook.link.speaks:
                self._save_global(self._save, given["model"])

    def _save_global(self, folder: str, model: Any) -> None:
        with follow(self._run, model) as following:
            if not following.update(wait_s=SAVE_S):
                raise Unavailable(f"{self._run}: no version has come within {SAVE_S:g} s: {folder} is not written")
        logger.info("%s: version %d of the global model of %s", folder, following.cut, self._run)
        self._trainer.save_model(folder)


class _Ahead:
    """Makes a Trainer's loader begin after `step` optimizer steps, although the Trainer begins at its first epoch."""

    def __init__(self, loader: Any, step: int, accumulation: int, most: int) -> None:
        try:
            of_an_epoch = max(1, ceil(len(loader) / accumulation))
        except TypeError:
            of_an_epoch = max(1, most)  # a stream has no length: all steps are one epoch
        self._first, steps = divmod(step, of_an_epoch)
        # If all steps are done, skip every batch, so that the Trainer stops.
        self._skipped = steps * accumulation if step < most or most <= 0 else sys.maxsize
        self._epoch = self._first - 1
        self._loader = loader
        self._own = getattr(loader, "set_epoch", None)
        if self._own is None or not hasattr(loader, "skip_batches"):
            logger.warning("cannot set the start position of a %s: the data starts anew", type(loader).__name__)
            self._own = None
        else:
            # The Trainer calls `set_epoch` with its own epoch number, and the loader with the last number that was set.
            loader.set_epoch = lambda _: self._own(self._epoch)

    def begin_epoch(self) -> None:
        """Begin the next epoch. In the first one, skip the batches that were already read."""
        if self._own is not None:
            self._epoch += 1
            self._loader.skip_batches = self._skipped if self._epoch == self._first else 0
