"""A TCP proxy before servers, which sends each connection where it is told to, and may change what comes back."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def wire(lead: Callable[[int], int], change: Callable[[bytes], bytes] = bytes) -> Iterator[int]:
    """Run the proxy on loopback; yield its port.

    `lead`: from the number of a connection, from 0 on, to the port of its server. `change`: what becomes of each piece
    that a server sends.
    """
    listening = socket.create_server(("127.0.0.1", 0))
    open_now: list[socket.socket] = [listening]

    def carry(source: socket.socket, target: socket.socket, changed: Callable[[bytes], bytes]) -> None:
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                target.sendall(changed(piece))
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            for number in range(1 << 30):
                near, _ = listening.accept()
                open_now.append(near)
                far = socket.create_connection(("127.0.0.1", lead(number)))
                open_now.append(far)
                for words in ((near, far, bytes), (far, near, change)):
                    threading.Thread(target=carry, args=words, daemon=True).start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield listening.getsockname()[1]
    finally:
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        accepting.join()  # it may have accepted one just now
        for end in open_now:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
