"""Prices: the defaults in a file beside this one, and those that the user gives instead."""

from pathlib import Path

from isthmus_services.board.prices import Prices
from isthmus_services.settings.tables import converted, read_table

PRICES = Path(__file__).with_name("prices.toml")


def prices_of(file: str | None, gpu_hour: float | None, assumed: list[str]) -> Prices:
    """Return the default prices, replaced by those in a file or a flag. Raises `InputError`.

    If the price of a GPU hour is not given, the default is noted in `assumed`.
    """
    ours = read_table(str(PRICES))
    own = read_table(file) if file else {}
    if gpu_hour is not None:
        own["gpu_hour"] = gpu_hour
    if "gpu_hour" not in own:
        assumed.append(f"${ours['gpu_hour']:g} for an hour of a GPU (--gpu-hour)")
    return converted(ours | own, Prices, file or str(PRICES)).check()
