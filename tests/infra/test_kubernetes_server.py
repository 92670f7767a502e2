"""A real Kubernetes API server accepts the manifests by the commands of their README, and admits each pod."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.api_server import ApiServer, api_server, missing
from infra.test_kubernetes import COMPONENT, OLDEST, ROOT, manifests, templates

pytestmark = pytest.mark.tier("all")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    if missing():
        why = f"not run: no {', '.join(missing())} on PATH or in KUBEBUILDER_ASSETS (setup-envtest downloads all three)"
        if os.environ.get("ISTHMUS_REQUIRE_KUBERNETES") == "1":
            pytest.fail(why, pytrace=False)
        pytest.skip(why)
    with api_server(tmp_path_factory.mktemp("kubernetes")) as running:
        version = json.loads(running.shell("kubectl version -o json", running.folder))["serverVersion"]
        if (int(version["major"]), int(version["minor"].rstrip("+"))) < OLDEST:
            pytest.skip(f"not run: {version['gitVersion']} is older than the manifests ask for")
        yield running


@dataclass(frozen=True)
class Applied:
    """The manifests as the README's commands have applied them, from a copy of the repository's folder."""

    server: ApiServer
    tree: Path
    first: str
    """What was printed until the wait for `init`."""
    rest: str
    """What was printed from there on."""

    def shell(self, script: str, fails: bool = False) -> str:
        return self.server.shell(script, self.tree, fails)


@pytest.fixture(scope="module")
def applied(server: ApiServer) -> Applied:
    tree = server.folder / "tree"
    shutil.copytree(ROOT, tree / "infra" / "kubernetes")
    create, wait, rest = block("kubectl apply -k infra/kubernetes -l")
    first = server.shell("\n".join([*block("kubectl apply -f infra/kubernetes/namespace.yaml"), create]), tree)
    # What the controller of the Job would write after the pod of `init` has ended, and the account that it would make.
    done = [{"type": name, "status": "True"} for name in ("SuccessCriteriaMet", "Complete")]
    now = "2026-01-01T00:00:00Z"
    status = {"startTime": now, "completionTime": now, "succeeded": 1, "conditions": done}
    controllers = [
        f"kubectl -n isthmus patch job init --subresource=status -p '{json.dumps({'status': status})}'",
        "kubectl -n isthmus create serviceaccount default",
    ]
    return Applied(server, tree, first, server.shell("\n".join([*controllers, wait, rest]), tree))


def block(first: str) -> list[str]:
    """Return the lines of the README's indented block that begins with a text."""
    (found,) = re.findall(rf"^    {re.escape(first)}.*(?:\n    .*)*", (ROOT / "README.md").read_text(), re.MULTILINE)
    return [line[4:] for line in found.splitlines()]


def test_the_readme_creates_every_object_and_the_run_first(applied: Applied) -> None:
    created = [set(re.findall(r"^(\S+)/(\S+) created$", said, re.MULTILINE)) for said in (applied.first, applied.rest)]
    objects = [(m["kind"].lower(), m["metadata"]["name"]) for path, m in manifests() if path.parent == ROOT]
    wanted = {(kind, name) for kind, name in objects}
    found = [{(kind.split(".")[0], name) for kind, name in names} for names in created]
    assert wanted <= found[0] | found[1]
    later = {(kind, name) for kind, name in wanted if kind == "deployment" or name == "learners"}
    assert later <= found[1]
    assert ("job", "init") in found[0]
    assert "Warning" not in applied.first + applied.rest


@pytest.mark.parametrize("name", sorted(templates()))
def test_the_namespace_admits_the_pods_and_refuses_root(applied: Applied, name: str) -> None:
    template: dict[str, Any] = json.loads(json.dumps(templates()[name]))
    spec = template["spec"]
    if name == "redis":
        spec["volumes"].append({"name": "data", "emptyDir": {}})  # of the claim that the StatefulSet makes
    pod = {"apiVersion": "v1", "kind": "Pod", **template}
    pod["metadata"].update(name=f"{name}-0", namespace="isthmus")
    file, create = applied.tree / f"{name}.yaml", f"kubectl create --dry-run=server -f {name}.yaml"
    file.write_text(yaml.safe_dump(pod))
    assert applied.shell(create) == f"pod/{name}-0 created (server dry run)\n"
    spec["securityContext"]["runAsNonRoot"] = False
    file.write_text(yaml.safe_dump(pod))
    assert 'violates PodSecurity "restricted' in applied.shell(create, fails=True)


def test_learners_get_a_new_image_by_the_command_of_the_readme_alone(applied: Applied) -> None:
    kustomization = applied.tree / "infra" / "kubernetes" / "kustomization.yaml"
    before = kustomization.read_text()
    kustomization.write_text(before.replace("newTag: 0.1.0", "newTag: 0.1.1"))
    assert "field is immutable" in applied.shell("kubectl apply -k infra/kubernetes", fails=True)
    (again,) = block("kubectl -n isthmus delete job learners")
    applied.shell("kubectl -n isthmus delete job init")  # as its time to live does
    assert "job.batch/learners created" in applied.shell(again)


def test_the_component_adds_a_redis_and_points_the_config_at_it(applied: Applied) -> None:
    kustomization = applied.tree / "infra" / "kubernetes" / "kustomization.yaml"
    text, count = re.subn(r"^# (components:)\n# (  - redis)$", r"\1\n\2", kustomization.read_text(), flags=re.MULTILINE)
    assert count == 1
    redis = applied.tree / "with-redis"
    shutil.copytree(kustomization.parent, redis)
    (redis / "kustomization.yaml").write_text(text)
    said = applied.shell(
        "\n".join([*block("kubectl -n isthmus create secret generic redis"), f"kubectl diff -k {redis} || true"])
    )
    assert "Warning" not in said
    applied.shell(f"kubectl apply -k {redis} -l app.kubernetes.io/name=redis")
    for document in yaml.safe_load_all((COMPONENT / "redis.yaml").read_text()):
        applied.shell(f"kubectl -n isthmus get {document['kind']} {document['metadata']['name']}")
    assert "redis://redis:6379" in said
