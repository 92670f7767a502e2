"""Ask a service on this host for its health: `python -m isthmus_services.probe [livez]`, for containers' health checks.

The address is in ISTHMUS_HTTP. The program prints the answer of /healthz (or /livez), and exits with 0 if the service
is healthy, 1 if not, and 2 without an address. It imports only a few standard modules.
"""

import os
import sys
import urllib.error
import urllib.request

LOOPBACK_FOR = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""The address at which to ask a service that listens on all addresses."""


def main() -> int:
    """Ask the service, print its answer, and return the exit code."""
    host, _, port = os.environ.get("ISTHMUS_HTTP", "").rpartition(":")
    if not port:
        print("ISTHMUS_HTTP is not set: this service has no health endpoint", file=sys.stderr)
        return 2
    path = sys.argv[1] if len(sys.argv) > 1 else "healthz"
    try:
        # The container's proxy, if any, is for other hosts.
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"http://{LOOPBACK_FOR.get(host, host)}:{port}/{path}", timeout=4) as answer:
            print(answer.read().decode().strip())
            return 0
    except urllib.error.HTTPError as error:
        print(error.read().decode().strip())
    except OSError as error:
        print(f"no answer on port {port}: {error}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
