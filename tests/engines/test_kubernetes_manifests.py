"""The manifests of `graphft kubernetes`: as a text, by the schemas of Kubernetes, and by what must agree in them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import graphft
from graphft.errors import UsageError
from graphft.runtime.engines.commands import add_parsers
from graphft.runtime.engines.kubernetes_command import MAX_NAME, of_job
from graphft.transpiler.job import Job
from tests.support.commands import refused, shown
from tests.support.golden import assert_golden
from tests.support.pods import expanded
from tests.support.programs_by_hand import linear

yaml = pytest.importorskip("yaml")

PLAIN = ("--image", "registry.example/graphft:1")
VERSIONS = ("1.28", "1.37")
URL = "s3://bucket/runs/cancer"
RICH = (
    *("--name", "cancer", "--trainers", "8", "--tls-secret", "cancer-etcd", "--cpu", "4", "--memory", "16Gi"),
    *("--env", "ATEN_CPU_CAPABILITY=avx2", "--env", "A=b=c", "--env-from-secret", "s3", "--env-from-secret", "etcd"),
    *("--volume", "data:/data/"),
)


def text_of(job: Job, url: str, *arguments: str) -> str:
    parser = argparse.ArgumentParser()
    add_parsers(parser.add_subparsers())
    return of_job(parser.parse_args(["kubernetes", url, *PLAIN, *arguments]), job.config, url)


def manifests_of(job: Job, url: str, *arguments: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text_of(job, url, *arguments)))


def make(**options: Any) -> Job:
    data = graphft.arrays(chunk_size=8, x=torch.zeros(32, 200), y=torch.zeros(32, 1))
    usual = {"trainers": 3, "pservers": 2, "ft": True, "name": "cancer"}
    return graphft.transpile(linear(), data=data, batch_size=4, **{**usual, **options})


def objects(job: Job, *arguments: str) -> list[dict[str, Any]]:
    return manifests_of(job, URL, *arguments)


def rich_job() -> Job:
    return make(dispatch="coordinator", chunk_timeout=300.0)


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Any]]:
    return objects(make())


@pytest.fixture(scope="module")
def rich() -> list[dict[str, Any]]:
    return objects(rich_job(), *RICH)


@pytest.fixture(params=["plain", "rich"])
def made(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def test_trainers_as_text() -> None:
    """The Job of the trainers has all that a pod of any role has; the rest of the template is checked by schema."""
    (text,) = (t for t in text_of(rich_job(), URL, *RICH).split("\n---\n") if "\nkind: Job\n" in t)
    assert_golden(text, "kubernetes_trainers")


@pytest.mark.parametrize("version", VERSIONS)
def test_by_the_schemas(version: str, made: list[dict[str, Any]]) -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    for item in made:
        schemas.validate(item, version, strict=True)


# -- what must agree --------------------------------------------------------------------------------------------------


def of_kind(made: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [item for item in made if item["kind"] in kinds]


def templates(made: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for item in of_kind(made, "StatefulSet", "Deployment", "Job"):
        yield item["metadata"]["name"], item["spec"]["template"]


def test_roles(plain: list[dict[str, Any]], rich: list[dict[str, Any]]) -> None:
    (job,) = of_kind(plain, "Job")
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (3, 3)
    assert not of_kind(plain, "Deployment"), "only a job whose tasks a coordinator gives out has one"
    (coordinators,) = of_kind(rich, "Deployment")
    assert coordinators["spec"]["replicas"] == 2
    own = objects(make(), "--etcd", "a:1,b:2")
    assert [item["metadata"]["name"] for item in own if "etcd" in item["metadata"]["name"]] == []
    assert "a:1,b:2" in dict(templates(own))["cancer-trainer"]["spec"]["containers"][0]["command"]
    (etcd,) = (t for name, t in templates(rich) if name == "cancer-etcd")
    assert "--peer-client-cert-auth" in etcd["spec"]["containers"][0]["command"]


# -- the command ------------------------------------------------------------------------------------------------------


def test_of_a_storage(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    url = f"file://{tmp_path}/storage/cancer"
    make(storage=url).save(tmp_path / "job")
    assert "job-directory" in refused(capsys, "kubernetes", url, *PLAIN)
    volume = ("--volume", f"shared:{tmp_path}/storage")
    assert "[kubernetes]" in refused(capsys, "kubernetes", tmp_path / "job", *PLAIN, *volume, "--trainers", "0")
    assert not (tmp_path / "storage").exists(), "what is refused changes nothing"
    by_folder = shown(capsys, "kubernetes", tmp_path / "job", *PLAIN, *volume)  # puts it there
    assert shown(capsys, "kubernetes", url + "/", *PLAIN, *volume) == by_folder
    for elsewhere in ((), ("--volume", "shared:/mnt")):
        assert "[kubernetes]" in refused(capsys, "kubernetes", url, *PLAIN, *elsewhere)
    assert url in by_folder


IN_VOLUME = (*PLAIN, "--volume", "shared:/jobs")


def test_dollars_stay(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A cluster replaces `$(NAME)` and `$$` in arguments and values of variables."""
    folder = tmp_path / "a$$b$(HOME)"
    make().save(folder)
    (job,) = of_kind(printed(capsys, folder, *IN_VOLUME, "--env", "PW=x$$y$(HOME)z"), "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    values = {v["name"]: v["value"] for v in container["env"] if "value" in v}
    assert expanded(values["PW"], {"HOME": "/workspace"}) == "x$$y$(HOME)z"
    assert "/jobs/a$$b$(HOME)" in [expanded(word, values) for word in container["command"]]
    assert "$(POD_INDEX)" in container["command"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(shown(capsys, "kubernetes", *arguments)))


def test_of_a_volume(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make().save(tmp_path / "jobs" / "cancer")
    assert "[kubernetes]" in refused(capsys, "kubernetes", tmp_path / "jobs" / "cancer", *PLAIN)
    (job,) = of_kind(printed(capsys, tmp_path / "jobs" / "cancer", *IN_VOLUME), "Job")
    spec = job["spec"]["template"]["spec"]
    assert "/jobs/cancer" in spec["containers"][0]["command"]
    assert {"name": "job", "persistentVolumeClaim": {"claimName": "shared"}} in spec["volumes"]


@pytest.mark.parametrize(
    ("options", "arguments", "rule"),
    [
        ({"ft": False}, (), "kubernetes"),
        ({}, ("--name", "Cancer"), "kubernetes"),
        ({}, ("--name", "a" * (MAX_NAME + 1)), "kubernetes"),
        ({}, ("--trainers", "0"), "kubernetes"),
        ({}, ("--etcd", "etcd:2379,http://localhost:2379"), "etcd-endpoints"),
        ({"etcd_endpoints": "127.0.0.1:2379"}, (), "etcd-endpoints"),
        ({}, ("--etcd", ","), "etcd-endpoint"),
        ({}, ("--env", "A"), "option"),
        ({}, ("--env", "POD_INDEX=1"), "option"),
        ({}, ("--volume", "claim"), "option"),
    ],
)
def test_refused(options: dict[str, Any], arguments: tuple[str, ...], rule: str) -> None:
    with pytest.raises(UsageError) as caught:
        objects(make(**options), *arguments)
    assert caught.value.rule == rule
