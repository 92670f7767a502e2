"""A long link between two network namespaces, which delays packets and loses some of them. Needs root.

    python -m isthmus_lab.bench.wire NAMESPACE NAMESPACE

Kernels often lack netem. This process passes packets between two TUN devices instead, so that both ends keep the
kernel's own TCP. The process prints `ready` on stdout and runs until it is killed.
"""

import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque

DELAY_S = 0.04
"""Delay each way. A round trip takes twice as long."""

LOSS = 0.0005
"""Share of the packets that is lost, each way."""

RATE = 25e6
"""Bytes a second, each way: 200 Mbit/s."""

QUEUE_S = 0.1
"""A packet that would wait longer than this for the link is dropped, as by a router."""

MTU = 9000
ADDRESSES = "10.77.0.1", "10.77.0.2"

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def ip(*words: str) -> None:
    """Run `ip`. Raises `CalledProcessError`."""
    subprocess.run(["ip", *words], check=True)


def _end(namespace: str, address: str) -> int:
    """Make a TUN device in a namespace; return the file for reading and writing its packets."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    name = f"wire-{address.rpartition('.')[2]}"
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    ip("link", "set", name, "netns", namespace)
    ip("-n", namespace, "addr", "add", f"{address}/24", "dev", name)
    ip("-n", namespace, "link", "set", name, "mtu", str(MTU), "txqueuelen", "10000", "up")
    ip("-n", namespace, "link", "set", "lo", "up")
    return file


def main() -> int:
    """Pass packets between the two devices until killed."""
    files = [_end(namespace, address) for namespace, address in zip(sys.argv[1:3], ADDRESSES, strict=True)]
    draw = random.Random(0)
    waiting: tuple[deque[tuple[float, bytes]], ...] = deque(), deque()
    """For each end, in order: when a packet arrives, and the packet."""
    free_at = [0.0, 0.0]
    poll = select.epoll()
    for file in files:
        poll.register(file, select.EPOLLIN)
    print("ready", flush=True)
    while True:
        due = min((queue[0][0] for queue in waiting if queue), default=time.monotonic() + 1.0)
        ready = poll.poll(max(0.0, due - time.monotonic()))
        now = time.monotonic()
        for file, _ in ready:
            to = 1 - files.index(file)
            for _ in range(64):
                try:
                    packet = os.read(file, MTU + 64)
                except BlockingIOError:
                    break
                start = max(now, free_at[to])
                if start - now > QUEUE_S or draw.random() < LOSS:
                    continue
                free_at[to] = start + len(packet) / RATE
                waiting[to].append((free_at[to] + DELAY_S, packet))
        for to, queue in enumerate(waiting):
            while queue and queue[0][0] <= now:
                try:
                    os.write(files[to], queue.popleft()[1])
                except (BlockingIOError, OSError):
                    continue  # the device is full or gone, so the packet is lost


if __name__ == "__main__":
    sys.exit(main())
