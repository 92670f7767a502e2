"""The API server would accept the Kubernetes manifests, and they have the properties that a run relies on."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from kubernetes_validate import utils, validate

from isthmus_services.commands import access
from isthmus_services.main import main

ROOT = Path(__file__).parents[2] / "infra" / "kubernetes"
COMPONENT = ROOT / "redis"
OLDEST = (1, 29)
"""The first version in which backoffLimitPerIndex and podReplacementPolicy are on by default."""

Manifest = dict[str, Any]

LEARNERS = tuple(f"learner-k8s-{i}" for i in range(4))


@functools.cache
def manifests() -> list[tuple[Path, Manifest]]:
    """Return every object for the cluster, with its file."""
    return [
        (path, document)
        for path in sorted(ROOT.rglob("*.yaml"))
        if path.name != "kustomization.yaml"
        for document in yaml.safe_load_all(path.read_text())
    ]


def named(kind: str, name: str) -> Manifest:
    (found,) = (m for _, m in manifests() if m["kind"] == kind and m["metadata"]["name"] == name)
    return found


def templates() -> dict[str, Manifest]:
    """Return the pod template of every object that creates pods, by name."""
    return {m["metadata"]["name"]: m["spec"]["template"] for _, m in manifests() if "template" in m.get("spec", {})}


def containers() -> Iterator[tuple[Manifest, Manifest]]:
    """Yield (pod, container)."""
    for template in templates().values():
        pod = template["spec"]
        for container in pod["containers"] + pod.get("initContainers", []):
            yield pod, container


def container_of(name: str) -> Manifest:
    found: list[Manifest] = templates()[name]["spec"]["containers"]
    (container,) = found
    return container


def environment_names() -> set[str]:
    """Return every ISTHMUS_ name that a manifest sets, directly, in a ConfigMap or in a Secret."""
    names = {entry["name"] for _, container in containers() for entry in container.get("env", [])}
    for _, manifest in manifests():
        if manifest["kind"] in {"ConfigMap", "Secret"}:
            names |= set(manifest.get("data", {})) | set(manifest.get("stringData", {}))
    return {name for name in names if name.startswith("ISTHMUS_")}


def selects(selector: Manifest, template: Manifest) -> bool:
    assert set(selector) == {"matchLabels"}
    wanted: dict[str, str] = selector["matchLabels"]
    labels: dict[str, str] = template["metadata"]["labels"]
    return wanted.items() <= labels.items()


def versions() -> list[str]:
    """Return the oldest supported version, or the next one that has a schema, and the newest version."""
    known = sorted({tuple(map(int, v.split(".")[:2])) for v in utils.all_versions()})
    chosen = [next(v for v in known if v >= OLDEST), known[-1]]
    assert chosen[0] < chosen[1]
    return [".".join(map(str, v)) for v in chosen]


@pytest.mark.parametrize("version", versions())
def test_every_object_is_valid(version: str) -> None:
    found = manifests()
    assert len(found) > 10
    for path, manifest in found:
        try:
            assert validate(manifest, version, strict=True) == version
        except Exception as error:
            raise AssertionError(f"{path.name}: {manifest['kind']} {manifest['metadata']['name']}: {error}") from error


@pytest.mark.parametrize(("folder", "kind"), [(ROOT, "Kustomization"), (COMPONENT, "Component")])
def test_a_kustomization_lists_every_manifest_but_the_secrets(folder: Path, kind: str) -> None:
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert kustomization["kind"] == kind
    assert kustomization["apiVersion"].startswith("kustomize.config.k8s.io/v1")
    there = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml", "secret.example.yaml"}
    assert sorted(kustomization["resources"]) == sorted(there)


def test_the_kustomization_sets_namespace_and_image_and_leaves_redis_out() -> None:
    kustomization = yaml.safe_load((ROOT / "kustomization.yaml").read_text())
    assert "components" not in kustomization
    assert kustomization["namespace"] == named("Namespace", "isthmus")["metadata"]["name"]
    (image,) = kustomization["images"]
    images = {c["image"] for _, c in containers()}
    assert {i for i in images if not i.startswith("redis:")} == {f"{image['name']}:{image['newTag']}"}
    assert all(re.search(r":\d+\.\d+\.\d+", i) for i in images), "each image needs a tag whose contents never change"


def test_the_component_points_the_config_at_its_service() -> None:
    (patch,) = yaml.safe_load((COMPONENT / "kustomization.yaml").read_text())["patches"]
    (operation,) = yaml.safe_load(patch["patch"])
    config, service = named(patch["target"]["kind"], patch["target"]["name"]), named("Service", "redis")
    assert operation["op"] == "replace"
    assert operation["path"].removeprefix("/data/") in config["data"]
    url = urlsplit(operation["value"])
    assert (url.scheme, url.hostname, url.port) == ("redis", "redis", service["spec"]["ports"][0]["port"])
    redis = named("StatefulSet", "redis")["spec"]
    assert redis["serviceName"] == "redis"
    assert service["spec"]["selector"].items() <= redis["template"]["metadata"]["labels"].items()
    arguments = container_of("redis")["args"]
    settings = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert settings["--appendonly"] == "yes"
    assert settings["--maxmemory-policy"] == "noeviction"
    assert settings["--aclfile"] == "/etc/redis/users.acl"


def test_containers_have_no_rights_and_have_limits() -> None:
    for pod, container in containers():
        name, of_pod, own = container["name"], pod["securityContext"], container["securityContext"]
        assert of_pod["runAsNonRoot"] is True, name
        assert of_pod["runAsUser"] == (999 if name == "redis" else 10001), name
        assert of_pod["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert own == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name
        for bound in ("requests", "limits"):
            assert {"cpu", "memory"} <= set(container["resources"][bound]), name
        assert pod["automountServiceAccountToken"] is False, name
        assert pod["enableServiceLinks"] is False, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod), name
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert not any("hostPath" in volume for volume in volumes.values()), name
        if name != "redis":
            assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"], name
            assert volumes["tmp"]["emptyDir"]["medium"] == "Memory", name


def test_no_manifest_holds_a_secret() -> None:
    secrets = [(path, m) for path, m in manifests() if m["kind"] == "Secret"]
    assert {m["metadata"]["name"] for _, m in secrets} == {"owner", "syncer", "collector", "reader", "redis", *LEARNERS}
    for path, secret in secrets:
        assert path.name == "secret.example.yaml"
        assert "data" not in secret
        assert set(secret["stringData"].values()) == {""}
    for _, container in containers():
        for entry in container.get("env", []):
            # Secrets are files, because an environment is inherited, and printed.
            assert "secretKeyRef" not in entry.get("valueFrom", {})
            if re.search("PASSWORD|CREDENTIALS|SECRET", entry["name"]):
                assert entry["value"].startswith("/run/isthmus/")
    for _, manifest in manifests():
        if manifest["kind"] == "ConfigMap":
            assert not any("@" in value for value in manifest["data"].values()), "a password in a URL"


def test_what_pods_refer_to_exists() -> None:
    for pod, container in containers():
        for source in container.get("envFrom", []):
            named("ConfigMap", source["configMapRef"]["name"])
        if container["name"] != "redis":
            account = named("ServiceAccount", pod["serviceAccountName"])
            assert account["automountServiceAccountToken"] is False
        volumes = {volume["name"] for volume in pod["volumes"]} | {
            claim["metadata"]["name"]
            for claim in named("StatefulSet", "redis")["spec"]["volumeClaimTemplates"]
            if container["name"] == "redis"
        }
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes


@pytest.mark.parametrize(
    ("name", "user"), [("init", "owner"), ("syncer", "syncer"), ("collector", "collector"), ("board", "reader")]
)
def test_a_pod_is_given_the_secrets_of_its_participant(name: str, user: str) -> None:
    pod, container = templates()[name]["spec"], container_of(name)
    (secret,) = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
    assert (secret["secretName"], pod["serviceAccountName"]) == (user, name if name == "board" else user)
    # A secret with nothing but AWS credentials is optional: workload identity replaces it. A bus password is required.
    assert secret.get("optional", False) is (user in ("owner", "collector"))
    assert secret["defaultMode"] == 0o440
    assert pod["securityContext"]["fsGroup"] == 10001
    environment = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    files = {value.rpartition("/")[2] for value in environment.values() if value.startswith("/run/isthmus/")}
    assert files == set(named("Secret", user)["stringData"]) - {access.BUS_USER}
    assert environment.get("ISTHMUS_BUS_USER", user) == user


def test_each_learner_is_given_its_own_secrets_and_no_others() -> None:
    pod, container = templates()["learners"]["spec"], container_of("learners")
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == "access"]
    assert mount == {
        "name": "access",
        "mountPath": "/run/isthmus",
        "subPathExpr": "$(JOB_COMPLETION_INDEX)",
        "readOnly": True,
    }
    (volume,) = [v["projected"] for v in pod["volumes"] if v["name"] == "access"]
    assert len(volume["sources"]) == len(LEARNERS) == named("Job", "learners")["spec"]["completions"]
    environment = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    for index, (source, user) in enumerate(zip(volume["sources"], LEARNERS, strict=True)):
        secret, wanted = source["secret"], set(named("Secret", user)["stringData"]) - {access.BUS_USER}
        assert secret["name"] == user
        assert {item["key"]: item["path"] for item in secret["items"]} == {key: f"{index}/{key}" for key in wanted}
        assert environment["ISTHMUS_BUS_USER"].replace("$(JOB_COMPLETION_INDEX)", str(index)) == user
        learner = environment["ISTHMUS_LEARNER"].replace("$(JOB_COMPLETION_INDEX)", str(index))
        assert user == f"learner-{learner}"
        assert {f"/run/isthmus/{key}" for key in wanted} <= set(environment.values())


def test_the_readme_makes_the_secrets_that_pods_ask_for(tmp_path: Path) -> None:
    line = next(line for line in (ROOT / "README.md").read_text().splitlines() if "isthmus access ~" in line)
    assert main(["access", str(tmp_path), *line.split("~/isthmus-access ")[1].split()]) == 0
    for _, secret in manifests():
        if secret["kind"] == "Secret" and secret["metadata"]["name"] != "redis":
            name, keys = secret["metadata"]["name"], set(secret["stringData"])
            assert {p.name for p in (tmp_path / name).iterdir()} == keys
            assert re.search(rf"\b{name}\b", (ROOT / "README.md").read_text())
    assert (tmp_path / "redis" / "users.acl").is_file()


def test_selectors_select() -> None:
    pods = templates()
    assert set(pods) == {"init", "syncer", "collector", "board", "learners", "redis"}
    for name in ("syncer", "collector", "board", "redis"):
        owner = named("StatefulSet" if name == "redis" else "Deployment", name)
        assert [n for n, pod in pods.items() if selects(owner["spec"]["selector"], pod)] == [name]
    assert [
        n for n, pod in pods.items() if selects(named("PodDisruptionBudget", "syncer")["spec"]["selector"], pod)
    ] == ["syncer"]
    spread = [(n, s) for n, pod in pods.items() for s in pod["spec"].get("topologySpreadConstraints", [])]
    assert {n for n, s in spread if s["topologyKey"] == "kubernetes.io/hostname"} == {"syncer", "learners"}
    for name, constraint in spread:
        assert [n for n, pod in pods.items() if selects(constraint["labelSelector"], pod)] == [name]


def test_two_syncers_one_of_which_always_stays() -> None:
    spec = named("Deployment", "syncer")["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert named("PodDisruptionBudget", "syncer")["spec"]["minAvailable"] == 1
    name = next(e for e in container_of("syncer")["env"] if e["name"] == "ISTHMUS_NAME")
    assert name["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}


@pytest.mark.parametrize("name", ["syncer", "learners"])
def test_an_outage_of_the_store_kills_nothing(name: str) -> None:
    template, container = templates()[name], container_of(name)
    port = urlsplit("//" + named("ConfigMap", "isthmus")["data"]["ISTHMUS_HTTP"]).port
    paths = {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/healthz"}
    for probe, path in paths.items():
        assert container[probe]["httpGet"] == {"path": path, "port": port}, probe
    assert container["livenessProbe"]["periodSeconds"] * container["livenessProbe"]["failureThreshold"] >= 60
    assert [p["containerPort"] for p in container["ports"]] == [port]
    assert template["metadata"]["annotations"] == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(port),
        "prometheus.io/path": "/metrics",
    }
    assert template["spec"]["terminationGracePeriodSeconds"] >= 30, "a syncer drains for 20 s"


def test_the_board_is_reached_through_a_forwarded_port_alone() -> None:
    container = container_of("board")
    environment = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    port = urlsplit("//" + environment["ISTHMUS_HTTP"]).port
    assert [p["containerPort"] for p in container["ports"]] == [port]
    assert container["readinessProbe"]["tcpSocket"] == {"port": port}
    assert environment["ISTHMUS_FORWARDED"] == "1"
    assert not [m for _, m in manifests() if m["kind"] in ("Service", "Ingress") and m["metadata"]["name"] != "redis"]
    assert f"port-forward deploy/board {port}" in (ROOT / "README.md").read_text()


def test_a_learner_keeps_its_name_and_its_shard() -> None:
    spec = named("Job", "learners")["spec"]
    count = spec["completions"]
    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == count
    names = [entry["name"] for entry in container_of("learners")["env"]]
    environment = {entry["name"]: entry for entry in container_of("learners")["env"]}
    assert environment["JOB_COMPLETION_INDEX"]["valueFrom"] == {
        "fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    }
    assert environment["ISTHMUS_LEARNER"]["value"] == "k8s-$(JOB_COMPLETION_INDEX)"
    assert environment["ISTHMUS_SHARD"]["value"] == f"$(JOB_COMPLETION_INDEX)/{count}"
    for name in ("ISTHMUS_LEARNER", "ISTHMUS_SHARD", "ISTHMUS_BUS_USER"):
        assert names.index("JOB_COMPLETION_INDEX") < names.index(name), "a variable must be declared before its use"


def test_a_reclaimed_learner_does_not_count_as_failed() -> None:
    spec = named("Job", "learners")["spec"]
    # The API server checks this beyond the schema.
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["podReplacementPolicy"] == "Failed"
    assert spec["maxFailedIndexes"] == spec["completions"], "a learner that is given up must stop no other"
    assert spec["backoffLimitPerIndex"] >= 1000
    reclaimed, told = spec["podFailurePolicy"]["rules"]
    assert reclaimed == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    codes = {"containerName": container_of("learners")["name"], "operator": "In", "values": [143]}
    assert told == {"action": "Ignore", "onExitCodes": codes}
    assert list(spec["template"]["spec"]["nodeSelector"]) == ["eks.amazonaws.com/capacityType"]


def test_nothing_comes_in_but_scrapes_and_little_goes_out() -> None:
    policies = {m["metadata"]["name"]: m["spec"] for _, m in manifests() if m["kind"] == "NetworkPolicy"}
    assert set(policies) == {"isthmus", "redis"}
    for name, pods in (("isthmus", {"init", "syncer", "collector", "board", "learners"}), ("redis", {"redis"})):
        assert {n for n, pod in templates().items() if selects(policies[name]["podSelector"], pod)} == pods
        assert set(policies[name]["policyTypes"]) == {"Ingress", "Egress"}
    tcp = "TCP"
    (scrape,) = policies["isthmus"]["ingress"]
    assert scrape["ports"] == [{"port": 9464, "protocol": tcp}]
    assert [list(peer) for peer in scrape["from"]] == [["namespaceSelector"]]
    assert scrape["from"][0]["namespaceSelector"]["matchLabels"]
    out = {(p["port"], p["protocol"]) for rule in policies["isthmus"]["egress"] for p in rule["ports"]}
    assert out == {(53, "UDP"), (53, tcp), (443, tcp), (6379, tcp)}
    (bus,) = policies["redis"]["ingress"]
    assert bus["ports"] == [{"port": 6379, "protocol": tcp}]
    assert bus["from"] == [{"podSelector": policies["isthmus"]["podSelector"]}]
    assert "egress" not in policies["redis"]


def test_every_name_in_the_environment_belongs_to_someone() -> None:
    for _, container in containers():
        names = [entry["name"] for entry in container.get("env", [])]
        assert len(names) == len(set(names))
        assert all(re.match(r"(ISTHMUS|AWS|JOB)_", name) for name in names)
    found = environment_names()
    assert {"ISTHMUS_RUN", "ISTHMUS_BUS", "ISTHMUS_NAME", "ISTHMUS_LEARNER", "ISTHMUS_BUS_PASSWORD_FILE"} <= found
    assert all(re.fullmatch(r"ISTHMUS(_[A-Z]+)+", name) for name in found)
