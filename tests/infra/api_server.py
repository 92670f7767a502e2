"""A Kubernetes API server with its etcd on loopback, as processes of this user.

It checks and stores objects as a cluster does. No controller, scheduler or node runs: nothing starts pods.
"""

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from isthmus_services.processes import end, tied
from isthmus_services.servers import free_ports

PROGRAMS = ("etcd", "kube-apiserver", "kubectl")
START_S = 120.0


def search_path() -> str:
    """Return the PATH for these programs: the folder of `setup-envtest` first, if its usual variable names one."""
    folders = [os.environ.get("KUBEBUILDER_ASSETS", ""), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return os.pathsep.join(filter(None, folders))


def missing() -> list[str]:
    """Return the programs that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=search_path()) is None]


@dataclass(frozen=True)
class ApiServer:
    """A running API server. `environment` makes `kubectl` use it, as an administrator."""

    folder: Path
    environment: dict[str, str]

    def shell(self, script: str, cwd: Path, fails: bool = False) -> str:
        """Run a script of the shell; return its output, standard error included.

        Raises `AssertionError` if the script succeeds where it should fail, or fails where it should succeed.
        """
        done = subprocess.run(
            ["sh", "-eu", "-c", script],
            env=self.environment, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode != 0) is fails, f"{script}\n{done.stdout}"
        return done.stdout


@contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    """Start etcd and an API server; stop both at the end. Raises `AssertionError` if they do not come up."""
    client, peer, port = free_ports(3)
    token, key = secrets.token_hex(16), folder / "accounts.key"
    pem = (serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())
    key.write_bytes(ec.generate_private_key(ec.SECP256R1()).private_bytes(*pem))
    (folder / "tokens.csv").write_text(f'{token},administrator,administrator,"system:masters"\n')
    (folder / "kubeconfig").write_text(
        f"""
apiVersion: v1
kind: Config
current-context: loopback
contexts: [{{name: loopback, context: {{cluster: loopback, user: administrator}}}}]
users: [{{name: administrator, user: {{token: "{token}"}}}}]
clusters:
  - name: loopback
    cluster: {{server: "https://127.0.0.1:{port}", certificate-authority: "{folder}/apiserver.crt"}}
"""
    )
    etcd = [
        "etcd", f"--data-dir={folder}/etcd", "--unsafe-no-fsync", f"--listen-client-urls=http://127.0.0.1:{client}",
        f"--advertise-client-urls=http://127.0.0.1:{client}", f"--listen-peer-urls=http://127.0.0.1:{peer}",
        f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}", f"--initial-cluster=default=http://127.0.0.1:{peer}",
    ]  # fmt: skip
    server = [
        "kube-apiserver", f"--etcd-servers=http://127.0.0.1:{client}", "--bind-address=127.0.0.1",
        f"--secure-port={port}", f"--cert-dir={folder}", f"--token-auth-file={folder}/tokens.csv",
        "--authorization-mode=RBAC", "--service-cluster-ip-range=10.0.0.0/24", f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}", "--service-account-issuer=https://kubernetes.default.svc",
    ]  # fmt: skip
    environment = {**os.environ, "PATH": search_path(), "KUBECONFIG": str(folder / "kubeconfig"), "HOME": str(folder)}
    made = ApiServer(folder, environment)
    with ExitStack() as stack:
        processes = []
        for command in (etcd, server):
            log = stack.enter_context(open(folder / f"{command[0]}.log", "ab"))
            process = subprocess.Popen(tied(command), env=environment, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(end, process, 20.0)
            processes.append(process)
        limit = time.monotonic() + START_S
        while not _ready(made):
            said = "".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in sorted(folder.glob("*.log")))
            assert time.monotonic() < limit, f"the API server did not come up\n{said}"
            assert all(p.poll() is None for p in processes), f"the API server or etcd has ended\n{said}"
            time.sleep(0.2)
        yield made


def _ready(server: ApiServer) -> bool:
    command = ["kubectl", "get", "--raw", "/readyz"]
    done = subprocess.run(command, env=server.environment, capture_output=True, text=True, check=False)
    return done.stdout == "ok"
