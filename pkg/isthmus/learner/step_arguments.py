"""Checks of what a training loop passes to `step`: numbers of Python, NumPy or torch; errors name the argument."""

from isthmus.errors import InputError
from isthmus.wording import an


def tokens_of(given: object) -> int:
    """Return a token count. Raises `InputError` unless it is a whole number of at least one."""
    number = _scalar(given, "tokens", "count them: batch.numel(), or attention_mask.sum()")
    if not number >= 1 or number != number // 1:
        raise InputError(f"step(tokens={given}): a step has a whole number of tokens, at least 1")
    return int(number)


def loss_of(given: object) -> float | None:
    """Return a loss, which need not be finite. Raises `InputError` if it is not a number."""
    return None if given is None else float(_scalar(given, "loss", "reduce it to one number: loss.mean()"))


def _scalar(given: object, name: str, remedy: str) -> int | float:
    """Return a Python number. For a tensor on a GPU, this waits until it is computed."""
    shape = getattr(given, "shape", ())
    if any(size != 1 for size in shape):
        raise InputError(f"step({name}=…): is of shape {tuple(shape)}; {remedy}")
    item = getattr(given, "item", None)
    value = item() if callable(item) else given
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"step({name}=…): is {an(type(given).__name__)}, not a number; {remedy}")
    return value
