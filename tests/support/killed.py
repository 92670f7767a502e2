"""Run an `isthmus` command and kill it by SIGKILL after its first, second, third … effect.

An effect is a file that got its name, a request to the store or to its users' API, or a request to Redis. For each line
of standard input, `[N, [WORD, …]]` in JSON, a process is forked that ends after N effects, and its exit code is printed.
"""

import json
import os
import pathlib
import signal
import sys
from collections.abc import Callable
from typing import Any

import aiobotocore.client
import redis.asyncio
import torch  # noqa: F401

from isthmus.codecs import kernels
from isthmus.store.edge import EdgeStore
from isthmus.torch import frozen, model  # noqa: F401
from isthmus_services.commands import create  # noqa: F401
from isthmus_services.main import main


class _Effects:
    """Counts effects, and kills this process after one of them."""

    def __init__(self, last: int) -> None:
        self._left = last

    def _happened(self) -> None:
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, owner: Any, name: str, *, waits: bool = True) -> None:
        """Count the calls of a method or function, whether they succeed or fail."""
        inner: Callable[..., Any] = getattr(owner, name)

        async def awaited(*words: Any, **named: Any) -> Any:
            try:
                return await inner(*words, **named)
            finally:
                self._happened()

        def called(*words: Any, **named: Any) -> Any:
            try:
                return inner(*words, **named)
            finally:
                self._happened()

        setattr(owner, name, awaited if waits else called)


def _run(last: int, words: list[str]) -> int:
    effects = _Effects(last)
    for name in ("replace", "write_text"):
        effects.watch(pathlib.Path, name, waits=False)
    effects.watch(os, "link", waits=False)
    effects.watch(aiobotocore.client.AioBaseClient, "_make_api_call")
    effects.watch(redis.asyncio.Redis, "execute_command")
    for name in ("put", "create"):
        effects.watch(EdgeStore, name)
    return main(words)


if __name__ == "__main__":
    kernels.warm()
    for line in sys.stdin:
        last, words = json.loads(line)
        child = os.fork()
        if not child:
            os.dup2(2, 1)  # standard output is for exit codes
            code = 1
            try:
                code = _run(last, words)
            finally:
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
