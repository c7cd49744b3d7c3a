"""What options of `graphft kubernetes` may be: what the cluster, or a container in it, would refuse later."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Sequence
from pathlib import PurePosixPath

from graphft.errors import UsageError
from graphft.runtime.engines.kubernetes.cluster_job import ClusterJob
from graphft.runtime.engines.kubernetes.pods import OWN_VARIABLES, SCRIPT, TLS, TLS_VARIABLES, TMP, WORK

_NUMBER = r"\+?(?=[0-9.]*[1-9])([0-9]+(\.[0-9]*)?|\.[0-9]+)"
_CPU = re.compile(_NUMBER + r"(n|u|m|k|[eE][-+]?[0-9]+)?")
_SIZE = re.compile(_NUMBER + r"(k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][0-9]+)?")
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_NAMESPACE = re.compile(_LABEL)
_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")
_RESOURCE = re.compile(rf"{_LABEL}(\.{_LABEL})*/[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?")
_PART = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?(?::[0-9]+)?/)?{_PART}(?:/{_PART})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)
"""As distribution/reference has it."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


_MOST = 2**31 - 1
_SCALES = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, **{unit: 1e3 ** (n + 1) for n, unit in enumerate("kMGTPE")}}
_SCALES |= {f"{unit}i": 1024.0 ** (n + 1) for n, unit in enumerate("KMGTPE")}
LEAST_MEMORY, LEAST_CPU = 2.0**20, 1e-3
_SYSTEM = ("bin", "boot", "dev", "lib", "lib64", "proc", "run", "sbin", "sys", "usr")
"""Folders of an image that a volume would hide."""


def check_options(job: ClusterJob) -> None:
    """Raises UsageError."""
    _check_counts(job)
    _check_resources(job)
    _check_names(job)
    _check_variables([name for name, _ in job.env], TLS_VARIABLES if job.tls_secret else ())
    if job.volume:
        _check_mount(job.volume[1])


def variable(text: str) -> tuple[str, str]:
    """Name and value of an --env. Raises UsageError."""
    name, equals, value = text.partition("=")
    if not (equals and _VARIABLE.fullmatch(name) and _is_utf8(value)):
        raise UsageError(
            f"--env is {text!r}, expected NAME=VALUE in UTF-8, NAME of letters, digits and '_', no digit first",
            rule="option",
            help="give --env NAME=VALUE",
        )
    return name, value


def volume(text: str) -> tuple[str, str]:
    """Claim and path of a --volume, the path as it is without `.` and needless `/`. Raises UsageError."""
    claim, _, path = text.partition(":")
    plain = posixpath.normpath("/" + path.lstrip("/"))
    wrong = ":" in path or not path.isprintable() or ".." in path.split("/")
    if not claim or not path.startswith("/") or plain == "/" or wrong:
        raise UsageError(
            f"--volume is {text!r}, expected CLAIM:/PATH, the path without ':' and '..', and not '/'",
            rule="option",
            help="name a PersistentVolumeClaim, and where its pods have it",
        )
    return claim, plain


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _check_counts(job: ClusterJob) -> None:
    for option, count in (("--gpus", job.trainer.gpus), ("--max-failures", job.max_failures)):
        _check_range(option, count, 0, _MOST)
    for option, count in (("--trainers", job.trainers), ("--coordinators", job.coordinators)):
        _check_range(option, count, 0, _MOST)
    _check_range("--etcd-members", job.etcd_members, 1, 9)


def _check_range(option: str, count: int, least: int, most: int) -> None:
    if not least <= count <= most:
        expected = f"{least} or more" if count < least else f"{most} or fewer"
        raise UsageError(f"{option} is {count}, expected {expected}", rule="option", help=f"correct {option}")


def _amount(text: str) -> float:
    """Of a quantity of Kubernetes."""
    unit = text.lstrip("+0123456789.")
    if unit[:1] in ("e", "E") and unit[-1].isdigit():
        return float(text)
    return float(text[: len(text) - len(unit)]) * _SCALES[unit]


def _check_resources(job: ClusterJob) -> None:
    for option, cpu in (("--cpu", job.trainer.cpu), ("--pserver-cpu", job.pserver.cpu)):
        _check_text(option, cpu, _CPU, "a positive quantity of CPUs", f"for half of one: {option} 500m")
        _check_amount(option, cpu, LEAST_CPU, 1e6, f"for half of one: {option} 500m")
    sizes = {"--memory": job.trainer.memory, "--pserver-memory": job.pserver.memory, "--etcd-storage": job.etcd_storage}
    for option, size in sizes.items():
        _check_text(option, size, _SIZE, "a positive quantity of bytes", f"for 4 GiB: {option} 4Gi")
        _check_amount(option, size, LEAST_MEMORY, 2.0**60, f"for 4 GiB: {option} 4Gi")
    names = "DOMAIN/NAME of a resource"
    _check_text("--gpu-resource", job.trainer.gpu, _RESOURCE, names, "as nodes have it: nvidia.com/gpu")


def _check_amount(option: str, text: str, least: float, most: float, remedy: str) -> None:
    """A number without a unit is of bytes, or of CPUs."""
    if not least <= _amount(text) <= most:
        raise UsageError(
            f"{option} is {text!r}, which is {_amount(text):g}, expected {least:g} to {most:g}",
            rule="option",
            help=remedy,
        )


def _check_names(job: ClusterJob) -> None:
    image = "the name of an image: small letters, digits, '-', '.', '_' and '/', then :TAG, then @sha256:DIGEST"
    _check_text("--image", job.image, _IMAGE, image, "for example registry.example/graphft:1")
    if job.etcd_image:
        _check_text("--etcd-image", job.etcd_image, _IMAGE, image, "or leave it out")
    if job.namespace:
        label = "at most 63 small letters, digits and '-', one of the first two at either end"
        _check_text("--namespace", job.namespace, _NAMESPACE, label, "see kubectl get namespaces")
    named = [("--storage-class", job.storage_class, "storageclasses"), ("--tls-secret", job.tls_secret, "secrets")]
    named += [("--image-pull-secret", job.pull_secret, "secrets")]
    named = [entry for entry in named if entry[1]]  # "": none is wanted
    named += [("--env-from-secret", name, "secrets") for name in job.env_from_secrets]
    named += [("--volume", job.volume[0], "persistentvolumeclaims")] if job.volume else []
    for option, name, kind in named:
        expected = "a name of small letters, digits, '-' and '.', as of a host"
        _check_text(option, name, _NAME, expected, f"see kubectl get {kind}")


def _check_text(option: str, text: str, grammar: re.Pattern[str], expected: str, remedy: str) -> None:
    if not grammar.fullmatch(text):
        raise UsageError(f"{option} is {text!r}, expected {expected}", rule="option", help=remedy)


def _check_variables(names: Sequence[str], of_tls: Collection[str]) -> None:
    for name in names:
        if name in of_tls:
            raise UsageError(
                f"--env {name} is set already: --tls-secret says it", rule="option", help=f"leave out --env {name}"
            )
        if name in OWN_VARIABLES:
            raise UsageError(
                f"--env {name} is set already: each pod has its own", rule="option", help=f"leave out --env {name}"
            )
        if names.count(name) > 1:
            raise UsageError(
                f"--env {name} is given {names.count(name)} times, expected once",
                rule="option",
                help=f"leave out all --env {name} but one",
            )


def _check_mount(path: str) -> None:
    """Below TMP it may be. TLS and SCRIPT cannot be written to, so no folder is made there; and below WORK are
    copies of jobs."""
    at = PurePosixPath(path)
    if at.parts[1] in _SYSTEM:
        raise UsageError(
            f"--volume is mounted at {path}, expected a path that hides nothing of the image's system",
            rule="option",
            help="give --volume another path, say CLAIM:/jobs",
        )
    for taken in map(PurePosixPath, (WORK, TLS, SCRIPT, TMP)):
        below = at.is_relative_to(taken) and taken != PurePosixPath(TMP)
        if below or taken.is_relative_to(at):
            raise UsageError(
                f"--volume is mounted at {path}, expected a path that does not meet {taken}, where pods have a folder",
                rule="option",
                help="give --volume another path, say CLAIM:/jobs",
            )
