"""The manifests of `graphft kubernetes`: as texts, by the schemas of Kubernetes, and by what must agree in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch

import graphft
from graphft.errors import UsageError
from graphft.runtime.cli import main
from graphft.runtime.engines.kubernetes.cluster_job import MAX_NAME, object_name
from graphft.runtime.engines.kubernetes.yaml_text import to_yaml
from graphft.transpiler import Job
from tests.engines.manifests_of import PLAIN, manifests_of
from tests.support.commands import refused, shown
from tests.support.golden import assert_golden
from tests.support.pods import expanded
from tests.support.programs_by_hand import linear

yaml = pytest.importorskip("yaml")

VERSIONS = ("1.28", "1.29", "1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
URL = "s3://bucket/runs/cancer"
RICH = (
    *("--name", "cancer", "--namespace", "research", "--trainers", "8"),
    *("--etcd-members", "5", "--etcd-storage", "8Gi", "--storage-class", "fast", "--tls-secret", "cancer-etcd"),
    *("--cpu", "4", "--memory", "16Gi", "--gpus", "2", "--gpu-resource", "amd.com/gpu"),
    *("--pserver-cpu", "2", "--pserver-memory", "8Gi", "--env", "ATEN_CPU_CAPABILITY=avx2", "--env", "A=b=c"),
    *("--env-from-secret", "s3", "--env-from-secret", "etcd", "--volume", "data:/data/"),
    *("--image-pull-secret", "registry", "--max-failures", "5"),
)


def make(**options: Any) -> Job:
    data = graphft.arrays(chunk_size=8, x=torch.zeros(32, 200), y=torch.zeros(32, 1))
    usual = {"trainers": 3, "pservers": 2, "ft": True, "name": "cancer"}
    return graphft.transpile(linear(), chunks=data, batch_size=4, **{**usual, **options})


def objects(job: Job, *arguments: str) -> list[dict[str, Any]]:
    return manifests_of(job, URL, *arguments)


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Any]]:
    return objects(make())


@pytest.fixture(scope="module")
def rich() -> list[dict[str, Any]]:
    return objects(make(dispatch="coordinator", chunk_timeout=300.0), *RICH)


@pytest.fixture(params=["plain", "rich"])
def made(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def test_as_text(plain: list[dict[str, Any]], rich: list[dict[str, Any]]) -> None:
    assert_golden(to_yaml(plain), "kubernetes")
    assert_golden(to_yaml(rich), "kubernetes_rich")


def test_yaml_says_what_was_meant(made: list[dict[str, Any]]) -> None:
    assert list(yaml.safe_load_all(to_yaml(made))) == made


WORDS = (
    *(
        "1e-3",
        "1e3",
        ".5e3",
        "1.e+3",
        "+12",
        "-.5",
        "0o17",
        "017",
        "0b11",
        "0x1f",
        "1_000",
        "1:30",
        "190:20:30.15",
        "08",
    ),
    *("y", "N", "yes", "No", "on", "OFF", "true", "False", "null", "NULL", "~", "", ".inf", "-.Inf", ".NaN", "=", "<<"),
    *("2001-12-14", "2001-12-14t21:59:43.10-05:00", "2001-12-14 21:59:43Z"),
)
SOMETHING_ELSE = re.compile(
    r"[-+]?(0b[01_]+|0o?[0-7_]+|0x[0-9a-f_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?|[-+]?\.inf|\.nan"
    r"|(\.[0-9_]+|[0-9][0-9_]*(\.[0-9_]*)?)(e[-+]?[0-9]+)?)|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}.*"
    r"|y|n|yes|no|on|off|true|false|null|~||=|<<",
    re.IGNORECASE,
)
"""What a parser of YAML 1.1, of YAML 1.2, or one of both, as kubectl has it, takes for no text unless it has quotes."""


def leaves(item: Any) -> Iterator[Any]:
    inner = item.values() if isinstance(item, dict) else item if isinstance(item, list) else None
    yield from (item,) if inner is None else (leaf for i in inner for leaf in leaves(i))


def test_texts_are_texts_for_every_parser() -> None:
    made = objects(make(), *(argument for n, word in enumerate(WORDS) for argument in ("--env", f"V{n}={word}")))
    assert set(WORDS) <= {leaf for leaf in leaves(made) if isinstance(leaf, str)}
    lines = [line.strip().removeprefix("- ") for line in to_yaml(made).splitlines() if line != "---"]
    plain = [re.sub(r"^[A-Za-z0-9./-]+:( |$)", "", line) for line in lines if not line.endswith(":")]
    others = [str(leaf).lower() for leaf in leaves(made) if not isinstance(leaf, str | dict | list)]
    assert sorted(text for text in plain if SOMETHING_ELSE.fullmatch(text)) == sorted(others)


def test_names_are_texts() -> None:
    assert to_yaml([{"1e3": "a", "y": {"0o17": 1}}]) == "'1e3': a\n'y':\n  '0o17': 1\n"


@pytest.mark.parametrize("version", VERSIONS)
def test_by_the_schemas(version: str, made: list[dict[str, Any]]) -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    for item in made:
        schemas.validate(item, version, strict=True)


def test_the_schemas_find_mistakes(plain: list[dict[str, Any]]) -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    (job,) = of_kind(plain, "Job")
    for wrong in ({"completionMod": "Indexed"}, {"completions": "3"}):
        with pytest.raises(schemas.ValidationError):
            schemas.validate({**job, "spec": {**job["spec"], **wrong}}, VERSIONS[-1], strict=True)


# -- what must agree --------------------------------------------------------------------------------------------------


def of_kind(made: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [item for item in made if item["kind"] in kinds]


def templates(made: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for item in of_kind(made, "StatefulSet", "Deployment", "Job"):
        yield item["metadata"]["name"], item["spec"]["template"]


def selectors(item: dict[str, Any]) -> list[dict[str, str]]:
    """Labels by which an object finds pods."""
    spec = item["spec"]
    if item["kind"] == "Service":
        return [spec["selector"]]
    found = [spec[key]["matchLabels"] for key in ("selector", "podSelector") if key in spec]
    spread = spec.get("template", {}).get("spec", {}).get("topologySpreadConstraints", [])
    return [*found, *(rule["labelSelector"]["matchLabels"] for rule in spread)]


def test_each_selector_finds_pods(made: list[dict[str, Any]]) -> None:
    labels = [template["metadata"]["labels"] for _, template in templates(made)]
    for item in made:
        for selector in selectors(item):
            assert any(selector.items() <= known.items() for known in labels), item["metadata"]["name"]
        if item["kind"] in ("StatefulSet", "Deployment"):
            (own,) = {tuple(s.items()) for s in selectors(item)}
            assert sum(set(own) <= set(known.items()) for known in labels) == 1, "it would take another's pods"


def test_names(made: list[dict[str, Any]]) -> None:
    names = [(item["kind"], item["metadata"]["name"]) for item in made]
    assert len(set(names)) == len(names)
    services = {name for kind, name in names if kind == "Service"}
    assert {item["spec"]["serviceName"] for item in of_kind(made, "StatefulSet")} <= services


def test_containers(made: list[dict[str, Any]]) -> None:
    for name, template in templates(made):
        spec = template["spec"]
        (container,) = spec["containers"]
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["port"] in ports, name
        assert {m["name"] for m in container["volumeMounts"]} - {"data"} <= {v["name"] for v in spec["volumes"]}
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert set(container["resources"]["requests"]) >= {"cpu", "memory"}
        written = {word for text in container["args"] for word in text.split("$(")[1:]}
        assert {word.split(")")[0] for word in written} <= {variable["name"] for variable in container["env"]}


def test_a_role_that_hangs_ends_itself_before_it_is_killed(made: list[dict[str, Any]]) -> None:
    """And a batch may be finished before a pod is."""
    timeout = 300.0 if len(of_kind(made, "Deployment")) else 60.0
    for _, template in templates(made):
        (container,) = template["spec"]["containers"]
        if container["name"] != "etcd":
            liveness = container["livenessProbe"]
            assert liveness["periodSeconds"] * liveness["failureThreshold"] > timeout
            assert template["spec"]["terminationGracePeriodSeconds"] > timeout


def test_roles(plain: list[dict[str, Any]], rich: list[dict[str, Any]]) -> None:
    """What differs between jobs."""
    (job,) = of_kind(plain, "Job")
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (3, 3)
    assert not of_kind(plain, "Deployment"), "only a job whose tasks a coordinator gives out has one"
    (coordinators,) = of_kind(rich, "Deployment")
    assert coordinators["spec"]["replicas"] == 2
    own = objects(make(), "--etcd", "a:1,b:2")
    assert [item["metadata"]["name"] for item in own if "etcd" in item["metadata"]["name"]] == []
    assert "a:1,b:2" in dict(templates(own))["cancer-trainer"]["spec"]["containers"][0]["args"]
    (etcd,) = (t for name, t in templates(rich) if name == "cancer-etcd")
    assert "--peer-client-cert-auth" in etcd["spec"]["containers"][0]["args"]


def test_a_single_trainer_can_be_drained() -> None:
    budgets = of_kind(objects(make(trainers=1)), "PodDisruptionBudget")
    assert {b["metadata"]["name"] for b in budgets} == {"cancer-etcd", "cancer-pserver"}


# -- the command ------------------------------------------------------------------------------------------------------


def test_of_a_storage(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    url = f"file://{tmp_path}/storage/cancer"
    make(storage=url).save(tmp_path / "job")
    assert "job-directory" in refused(capsys, "kubernetes", url, *PLAIN)
    volume = ("--volume", f"shared:{tmp_path}/storage")
    assert "--cpu" in refused(capsys, "kubernetes", tmp_path / "job", *PLAIN, *volume, "--cpu", "many")
    assert not (tmp_path / "storage").exists(), "what is refused changes nothing"
    by_folder = shown(capsys, "kubernetes", tmp_path / "job", *PLAIN, *volume)  # puts it there
    assert shown(capsys, "kubernetes", url + "/", *PLAIN, *volume) == by_folder
    for elsewhere in ((), ("--volume", "shared:/mnt")):
        assert "this machine's disk" in refused(capsys, "kubernetes", url, *PLAIN, *elsewhere)
    assert f"- {url}\n" in by_folder


def test_of_a_job_that_is_complete(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make().save(tmp_path / "job")
    (tmp_path / "job" / "model.safetensors").touch()
    assert main(["kubernetes", str(tmp_path / "job"), *IN_VOLUME]) == 0
    assert "is complete: its processes would find nothing to do" in capsys.readouterr().err


def test_dollars_stay(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A cluster replaces `$(NAME)` and `$$` in arguments and values of variables."""
    folder = tmp_path / "a$$b$(HOME)"
    make().save(folder)
    (job,) = of_kind(printed(capsys, folder, *IN_VOLUME, "--env", "PW=x$$y$(HOME)z"), "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    values = {v["name"]: v["value"] for v in container["env"] if "value" in v}
    assert expanded(values["PW"], {"HOME": "/workspace"}) == "x$$y$(HOME)z"
    assert "/jobs/a$$b$(HOME)" in [expanded(word, values) for word in container["args"]]
    assert "$(POD_INDEX)" in container["args"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(shown(capsys, "kubernetes", *arguments)))


def test_of_a_volume(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make().save(tmp_path / "jobs" / "cancer")
    assert "volume" in refused(capsys, "kubernetes", tmp_path / "jobs" / "cancer", *PLAIN)
    text = shown(capsys, "kubernetes", tmp_path / "jobs" / "cancer", *PLAIN, "--volume", "shared:/jobs")
    assert "- /jobs/cancer\n" in text
    assert "claimName: shared\n" in text


@pytest.mark.parametrize(
    ("options", "arguments", "told"),
    [
        ({"ft": False}, (), "ft=True"),
        ({}, ("--etcd-members", "2"), "odd number"),
        ({}, ("--name", "Cancer"), "no name"),
        ({}, ("--name", "a" * (MAX_NAME + 1)), "no name"),
        ({}, ("--trainers", "-1"), "at least 1"),
        ({}, ("--etcd", "etcd:2379,http://localhost:2379"), "etcd at http://localhost:2379"),
        ({"etcd_endpoints": "127.0.0.1:2379"}, (), "out of reach"),
        ({}, ("--env", "A"), "NAME=VALUE"),
        ({}, ("--volume", "claim"), "CLAIM:/PATH"),
        ({}, ("--trainers", "0"), "0 trainers were asked for, expected at least 1"),
        ({}, ("--coordinators", "-1"), "-1 coordinators were asked for, expected at least 0"),
        ({"dispatch": "coordinator"}, ("--coordinators", "0"), "0 coordinators were asked for, expected at least 1"),
        ({}, ("--etcd", ","), "'' is not an etcd endpoint"),
        ({}, ("--etcd", "0.0.0.0:2379"), "etcd at 0.0.0.0:2379 is out of reach"),
    ],
)
def test_refused(options: dict[str, Any], arguments: tuple[str, ...], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        objects(make(**options), *arguments)
    assert told in str(caught.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs") / "cancer"
    make().save(folder)
    return folder


IN_VOLUME = (*PLAIN, "--volume", "shared:/jobs")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--image", ""), "--image is '', expected the name of an image"),
        (("--image", "a b"), "--image is 'a b', expected the name of an image"),
        (("--etcd-image", "a\n"), "--etcd-image is 'a\\n', expected the name of an image"),
        (("--gpus", "-1"), "--gpus is -1, expected 0 or more"),
        (("--gpu-resource", "gpu"), "--gpu-resource is 'gpu', expected DOMAIN/NAME"),
        (("--gpu-resource", "amd.com/gpu"), "and no GPU is asked for"),
        (("--max-failures", "-1"), "--max-failures is -1, expected 0 or more"),
        (("--trainers", "-1"), "-1 trainers were asked for"),
        (("--cpu", "abc"), "--cpu is 'abc', expected a positive quantity of CPUs"),
        (("--cpu", "0"), "--cpu is '0', expected"),
        (("--pserver-cpu", "-1"), "--pserver-cpu is '-1', expected"),
        (("--memory", "x"), "--memory is 'x', expected a positive quantity of bytes"),
        (("--memory", "4m"), "--memory is '4m', expected"),
        (("--pserver-memory", "4GB"), "--pserver-memory is '4GB', expected"),
        (("--pserver-memory", "0.0Gi"), "--pserver-memory is '0.0Gi', expected"),
        (("--etcd-storage", "x"), "--etcd-storage is 'x', expected a positive quantity of bytes"),
        (("--env", "1 A=x"), "--env is '1 A=x', expected NAME=VALUE"),
        (("--env", "A\n=x"), "--env is 'A\\n=x', expected NAME=VALUE"),
        (("--env", "A=\udcff"), "expected NAME=VALUE in UTF-8"),
        (("--env", "GRAPHFT_HOST=a"), "--env GRAPHFT_HOST is set already"),
        (("--env", "POD_INDEX=1"), "--env POD_INDEX is set already"),
        (("--env", "GRAPHFT_ETCD_CA=a", "--tls-secret", "etcd-tls"), "--env GRAPHFT_ETCD_CA is set already"),
        (("--env", "A=1", "--env", "B=1", "--env", "A=2"), "--env A is given 2 times, expected once"),
        (("--volume", "c:/"), "--volume is 'c:/', expected CLAIM:/PATH"),
        (("--volume", "c://."), "--volume is 'c://.', expected CLAIM:/PATH"),
        (("--volume", "c:/a/../tmp"), "expected CLAIM:/PATH, the path without ':' and '..'"),
        (("--volume", "c:/a:b"), "expected CLAIM:/PATH"),
        (("--volume", "c:/tmp"), "mounted at /tmp, expected a path that does not meet /tmp"),
        (("--volume", "c:/workspace"), "expected a path that does not meet /workspace"),
        (("--volume", "c://workspace/./a"), "mounted at /workspace/a, expected a path that does not meet /workspace"),
        (("--volume", "c:/etc/graphft/etcd"), "expected a path that does not meet /etc/graphft/etcd"),
        (("--volume", "c:/etc"), "expected a path that does not meet /etc/graphft/etcd"),
        (("--volume", "c:/etc/graphft/etcd/a"), "expected a path that does not meet /etc/graphft/etcd"),
        (("--volume", "Shared:/jobs"), "--volume is 'Shared', expected a name"),
        (("--namespace", "Foo_Bar\n"), "--namespace is 'Foo_Bar\\n', expected"),
        (("--namespace", "a" * 64), "expected at most 63"),
        (("--namespace", "a.b"), "--namespace is 'a.b', expected"),
        (("--storage-class", "a_b"), "--storage-class is 'a_b', expected a name"),
        (("--tls-secret", "-a"), "--tls-secret is '-a', expected a name"),
        (("--image-pull-secret", "a..b"), "--image-pull-secret is 'a..b', expected a name"),
        (("--env-from-secret", ""), "--env-from-secret is '', expected a name"),
        (("--env-from-secret", "a" * 254), "expected a name"),
        (("--name", "a\n"), "'a\\n' is no name"),
        (("--trainers", "99999999999"), "--trainers is 99999999999, expected 2147483647 or fewer"),
        (("--max-failures", "99999999999"), "--max-failures is 99999999999, expected"),
        (("--etcd-members", "99"), "--etcd-members is 99, expected 9 or fewer"),
        (("--gpus", "1"), '--gpus is 1, and job cancer runs on device "cpu"'),
        (("--memory", "4"), "--memory is '4', which is 4, expected"),
        (("--memory", "99999999Ei"), "--memory is '99999999Ei', which is"),
        (("--cpu", "1e400"), "--cpu is '1e400', which is inf"),
        (("--image", "a:"), "--image is 'a:', expected the name of an image"),
        (("--image", "a:b:c"), "--image is 'a:b:c', expected"),
        (("--image", "a//b"), "--image is 'a//b', expected"),
        (("--image", "UPPER/x"), "--image is 'UPPER/x', expected"),
        (("--image", "a@sha256:zz"), "--image is 'a@sha256:zz', expected"),
        (("--etcd", "a b:1"), "'a b:1' is not an etcd endpoint"),
        (("--etcd", "$(id):1"), "'$(id):1' is not an etcd endpoint"),
        (("--volume", "c:/proc"), "mounted at /proc, expected a path that hides nothing"),
        (("--volume", "c:/usr/lib"), "mounted at /usr/lib, expected a path that hides nothing"),
        (("--etcd", "h:1", "--storage-class", "fast"), "--storage-class is of an etcd that is deployed"),
        (("--etcd", "h:1", "--etcd-members", "3"), "--etcd-members is of an etcd that is deployed"),
        (("--etcd", "http://h:1", "--tls-secret", "s"), "would be asked without TLS"),
        (("--args", "--lr 1"), "--args is for a script"),
    ],
)
def test_options_that_cannot_be(
    options: tuple[str, ...], told: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [f"{option}={value}" for option, value in zip(options[::2], options[1::2], strict=True)]
    assert told in refused(capsys, "kubernetes", folder, *IN_VOLUME, *pairs)


@pytest.mark.parametrize("option", ["--cpu", "--pserver-cpu"])
@pytest.mark.parametrize("cpu", ["1", "500m", "0.5", ".5", "+2", "1e1"])
def test_quantities_of_cpus(option: str, cpu: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cpu in shown(capsys, "kubernetes", folder, *IN_VOLUME, option, cpu)


@pytest.mark.parametrize("option", ["--memory", "--pserver-memory", "--etcd-storage"])
@pytest.mark.parametrize("size", ["1073741824", "1.5Gi", "16G", "1e9", "1E", "10Mi"])
def test_quantities_of_bytes(option: str, size: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert size in shown(capsys, "kubernetes", folder, *IN_VOLUME, option, size)


def test_names_that_may_be(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = (
        "--storage-class",
        "fast.ssd",
        "--namespace",
        "a" * 63,
        "--env-from-secret",
        "s3.eu",
        "--volume",
        "c.d:/e/",
    )
    text = shown(capsys, "kubernetes", folder, *IN_VOLUME, *names)
    assert "storageClassName: fast.ssd\n" in text
    assert "mountPath: /e\n" in text


def test_variables_are_there_once() -> None:
    """An --env takes the place of what roles are given by default."""
    made = objects(make(), "--env", "HOME=/jobs", "--env", "OMP_NUM_THREADS=3")
    for _, template in templates(made):
        (container,) = template["spec"]["containers"]
        names = [variable["name"] for variable in container["env"]]
        assert sorted(set(names)) == sorted(names)
        if container["name"] != "etcd":
            values = {variable["name"]: variable.get("value") for variable in container["env"]}
            assert (values["HOME"], values["OMP_NUM_THREADS"]) == ("/jobs", "3")


def test_no_mount_hides_another(made: list[dict[str, Any]]) -> None:
    for name, template in templates(made):
        paths = [PurePosixPath(mount["mountPath"]) for mount in template["spec"]["containers"][0]["volumeMounts"]]
        assert not [(a, b) for a in paths for b in paths if a is not b and a.is_relative_to(b)], name


@pytest.mark.parametrize("job", ["cancer", "Cancer", "can_cer", "can-cer", "9lives", "___", "a" * 64, "-x-"])
def test_names_of_jobs_become_names_of_objects(job: str) -> None:
    name = object_name(job)
    assert (name == job) == (job in ("cancer", "can-cer"))
    objects(make(), "--name", name)


def test_jobs_with_like_names_do_not_meet() -> None:
    assert len({object_name(job) for job in ("can-cer", "can_cer", "Can-cer", "can--cer")}) == 4


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["kubernetes", "--help"])
    assert "--env-from-secret" in capsys.readouterr().out
