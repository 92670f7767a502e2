"""Ask a service on this host how it is: `python -m isthmus_services.probe [livez]`, for a container's health check.

Reads the address from ISTHMUS_HTTP. Prints what /healthz says; exit code 0 if that is good. Imports next to nothing.
"""

import os
import sys
import urllib.error
import urllib.request

LOOPBACK_FOR = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""Where to ask what listens everywhere."""


def main() -> int:
    """Ask."""
    host, _, port = os.environ.get("ISTHMUS_HTTP", "").rpartition(":")
    if not port:
        print("ISTHMUS_HTTP is not set: this service shows nothing over HTTP", file=sys.stderr)
        return 2
    path = sys.argv[1] if len(sys.argv) > 1 else "healthz"
    try:
        # A proxy that the container was given is for others.
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
