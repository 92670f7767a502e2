"""Ask a service on this host how it is: `python -m isthmus_services.probe [livez]`, for a container's health check.

Reads the port from ISTHMUS_HTTP. Prints what /healthz says; exit code 0 if that is good. Imports next to nothing.
"""

import os
import sys
import urllib.error
import urllib.request


def main() -> int:
    """Ask."""
    port = os.environ.get("ISTHMUS_HTTP", "").rpartition(":")[2]
    if not port:
        print("ISTHMUS_HTTP is not set: this service shows nothing over HTTP", file=sys.stderr)
        return 2
    path = sys.argv[1] if len(sys.argv) > 1 else "healthz"
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=4) as answer:
            print(answer.read().decode().strip())
            return 0
    except urllib.error.HTTPError as error:
        print(error.read().decode().strip())
    except OSError as error:
        print(f"no answer on port {port}: {error}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
