"""The pods of a job's manifests, run as local processes: what becomes of a job that loses some. It is no cluster."""

from __future__ import annotations

import datetime
import ipaddress
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from graphft.errors import GraphftError
from graphft.runtime.coordination.job_storage import fetch, publish
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.status import JobStatus, read_status
from graphft.runtime.engines.kubernetes.manifests import literal
from graphft.runtime.etcd import EtcdUnreachable
from graphft.runtime.etcd.client import open_etcd
from graphft.transpiler import Job
from tests.engines.manifests_of import manifests_of
from tests.integration import training
from tests.integration.plays import Pace, Played, assert_same_bits, brake, note_look, play, whole_state
from tests.support.cluster import Cluster, JobState

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="each pod has a loopback address of its own"),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return play(training.job(training.program()), tmp_path_factory.mktemp("undisturbed") / "job")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster") as made:
        yield made


class OnCluster:
    """A job in a storage in `folder`, seen from outside. `arguments`: of `graphft kubernetes`."""

    def __init__(self, cluster: Cluster, folder: Path, *arguments: str, **options: Any) -> None:
        self.cluster, self.folder, self.pace = cluster, folder, Pace(folder / "pace")
        self.pace.set(Pace.SLOW)
        self.storage = folder / "storage" / "blobs"
        usual = {"lease_ttl": 20, "checkpoint_every": 4, "storage": f"file://{self.storage}"}
        self.job = training.job(training.program(), pace=self.pace.file, **{**usual, **options})
        self.job.save(folder / "saved")
        publish(folder / "saved")
        self.config = self.job.config.to_json()
        self.scheme, self.login = "http", dict[str, str]()
        """How etcd is reached from here."""
        volume = ("--volume", f"storage:{folder}/storage")
        self.manifests = manifests_of(self.job, self.job.config.storage, *volume, *arguments)
        cluster.apply(self.manifests)

    def apply_to(self, cluster: Cluster) -> None:
        """Another cluster; the first is gone."""
        self.cluster = cluster
        cluster.apply(self.manifests)

    def status(self) -> JobStatus | None:
        try:
            with open_etcd([f"{self.scheme}://{self.cluster.address('blobs-etcd')}:2379"], self.login) as client:
                return read_status(client, Keys("blobs"), deadline=1.0)
        except GraphftError:
            return None

    def until(self, condition: Callable[[JobStatus], bool]) -> JobStatus:
        last: list[JobStatus] = []

        def seen() -> bool:
            note_look(self.config, True)
            status = self.status()
            if status is None:
                return False
            brake(self.config, status)
            last[:] = [status]
            return condition(status)

        self.cluster.until(seen)
        note_look(self.config, False)
        return last[0]

    def goes_on(self) -> None:
        """Returns when all shards serve, and a step was made since."""
        before = self.until(lambda s: len(s.pservers) == 2 and self.cluster.ready("pserver") == 2)
        self.until(lambda s: s.step > before.step + 1)

    @property
    def trainers(self) -> JobState:
        return self.cluster.job("blobs-trainer")

    def completes(self) -> None:
        self.pace.set(0)
        self.cluster.until(lambda: self.trainers.complete or self.trainers.failed)
        assert self.trainers.complete, self.trainers.failed

    def assert_same(self, undisturbed: Played) -> None:
        copy = self.folder / "copy"
        fetch(self.job.config.storage, copy)
        assert_same_bits(whole_state(Job.load(copy), copy), undisturbed.state)
        assert (self.storage / "model.safetensors").read_bytes() == undisturbed.result.model.read_bytes()


def test_a_job_that_loses_pods_gives_the_same_bits(cluster: Cluster, tmp_path: Path, undisturbed: Played) -> None:
    job = OnCluster(cluster, tmp_path)
    job.until(lambda s: s.step >= 6 and s.checkpoint is not None and s.checkpoint >= 4)
    cluster.until(lambda: cluster.ready("etcd") == 3 and cluster.ready("pserver") == 2)

    before = cluster.pods["blobs-pserver-0"].restarts
    cluster.pods["blobs-pserver-0"].signal(signal.SIGKILL)
    cluster.until(lambda: cluster.pods["blobs-pserver-0"].restarts > before)
    job.goes_on()

    cluster.pods["blobs-trainer-1"].signal(signal.SIGKILL)
    cluster.until(lambda: job.trainers.failures == 1)
    job.until(lambda s: len(s.trainers) == 3)

    for name in ("blobs-pserver-1", "blobs-trainer-0", "blobs-etcd-0"):  # as a drain of one node after the other
        old = cluster.pods[name]
        cluster.until(lambda name=name: evict_when_ready(cluster, name))
        cluster.until(lambda name=name, old=old: cluster.pods.get(name, old) is not old)
        cluster.until(lambda: cluster.ready("etcd") == 3)
        job.goes_on()
    assert "left: SIGTERM asked this pserver to" in (cluster.folder / "blobs-pserver-1.log").read_text()

    job.completes()
    assert job.trainers.ignored >= 1, "the one that was evicted is no failure, and its place is taken"
    job.assert_same(undisturbed)
    cluster.until(lambda: cluster.ready("pserver") == 2)  # they stay: nothing is started again and again
    assert not cluster.running("trainer")


def evict_when_ready(cluster: Cluster, name: str) -> bool:
    """One that is just being started again has nothing to leave."""
    with cluster._lock:
        return cluster.pods[name].ready and cluster.evict(name)


def test_coordinators_take_over(cluster: Cluster, tmp_path: Path, undisturbed: Played) -> None:
    """With an etcd of one member, all pods of which are new in between."""
    job = OnCluster(cluster, tmp_path, "--etcd-members", "1", dispatch="coordinator")
    job.until(lambda s: s.step >= 3 and len(s.coordinators) == 2)
    for pod in cluster.running("coordinator"):
        cluster.delete_pod(pod.name)
        job.until(lambda s: len(s.coordinators) == 2 and any(c["serving"] for c in s.coordinators.values()))
        job.goes_on()
    job.completes()
    job.assert_same(undisturbed)
    cluster.until(lambda: cluster.ready("coordinator") == 2)


def test_etcd_with_certificates(cluster: Cluster, tmp_path: Path, undisturbed: Played) -> None:
    """Members and roles show theirs; one without gets no answer."""
    cluster.secrets["blobs-tls"] = files = certificate(
        ["blobs-etcd", "*.blobs-etcd-peer"],
        ["127.0.0.1", *(cluster.numbered(n) for n in range(1, 100))],  # all pods call from the first
    )
    job = OnCluster(cluster, tmp_path, "--tls-secret", "blobs-tls")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    names = {"CA": "ca.crt", "CERT": "tls.crt", "KEY": "tls.key"}
    job.scheme, job.login = "https", {f"GRAPHFT_ETCD_{n}": str(tmp_path / file) for n, file in names.items()}
    job.until(lambda s: s.step >= 3)
    cluster.delete_pod("blobs-etcd-0")
    cluster.pods["blobs-pserver-1"].signal(signal.SIGKILL)
    job.goes_on()
    only_authority = {"GRAPHFT_ETCD_CA": job.login["GRAPHFT_ETCD_CA"]}
    url = f"https://{cluster.address('blobs-etcd')}:2379"
    with open_etcd([url], only_authority) as stranger, pytest.raises(EtcdUnreachable):
        stranger.ping(2.0)
    job.completes()
    job.assert_same(undisturbed)


def certificate(names: Sequence[str], addresses: Sequence[str]) -> dict[str, bytes]:
    """The files of a Secret, as cert-manager makes them: one certificate for servers and clients, and its authority."""
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    authority, subject = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, n)]) for n in ("authority", "etcd"))
    alternatives = [*map(x509.DNSName, names), *(x509.IPAddress(ipaddress.ip_address(a)) for a in addresses)]
    uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    root = _signed(authority, authority, keys[0], keys[0], x509.BasicConstraints(ca=True, path_length=0))
    leaf = _signed(subject, authority, keys[1], keys[0], x509.SubjectAlternativeName(alternatives), uses)
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private = keys[1].private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    return {"ca.crt": root.public_bytes(pem), "tls.crt": leaf.public_bytes(pem), "tls.key": private}


def _signed(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    by: ec.EllipticCurvePrivateKey,
    *extensions: x509.ExtensionType,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(hours=1))
    builder = builder.not_valid_after(now + datetime.timedelta(days=1))
    for extension in extensions:
        builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
    return builder.sign(by, hashes.SHA256())


# -- what a Job makes of the ends of its pods -------------------------------------------------------------------------


def ending(folder: Path, script: str) -> list[Mapping[str, Any]]:
    """The manifests' trainers, which run a script of the shell instead."""
    job = training.job(training.program(), trainers=1, storage="s3://bucket/runs/blobs")
    (trainers,) = [m for m in manifests_of(job, job.config.storage) if m["kind"] == "Job"]
    trainers["spec"]["backoffLimit"] = 2
    (container,) = trainers["spec"]["template"]["spec"]["containers"]
    container["command"] = ["sh", "-c", literal(script), "$(POD_INDEX)", f"/{folder}/count"]
    return [trainers]


@pytest.mark.parametrize(
    ("script", "complete", "ignored", "failures"),
    [
        ("exit 0", True, 0, 0),
        ("exit 2", False, 0, 0),
        ("exit 1", False, 0, 3),
        ("kill -9 $$", False, 0, 3),
        ('echo >> "$1"; [ $(wc -l < "$1") -gt 5 ] || exit 75', True, 5, 0),
        ('echo >> "$1"; [ $(wc -l < "$1") -gt 5 ] || kill $$', True, 5, 0),
    ],
)
def test_ends_of_trainers(
    cluster: Cluster, tmp_path: Path, script: str, complete: bool, ignored: int, failures: int
) -> None:
    """A lost lease and SIGTERM are no failures, however often; three failures are too many; 2 ends it at once."""
    cluster.apply(ending(tmp_path, script))
    cluster.until(lambda: cluster.job("blobs-trainer").complete or cluster.job("blobs-trainer").failed)
    state = cluster.job("blobs-trainer")
    assert (state.complete, state.ignored, state.failures) == (complete, ignored, failures)


def test_a_budget_keeps_the_last_trainer(cluster: Cluster, tmp_path: Path) -> None:
    job = training.job(training.program(), trainers=2, storage="s3://bucket/runs/blobs")
    made = [m for m in manifests_of(job, job.config.storage) if m["metadata"]["name"] == "blobs-trainer"]
    for item in made:
        if item["kind"] == "Job":
            (container,) = item["spec"]["template"]["spec"]["containers"]
            container["command"] = ["sleep", "600"]
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                del container[probe]
    cluster.apply(made)
    cluster.until(lambda: cluster.ready("trainer") == 2)
    with cluster._lock:  # the first is not replaced meanwhile
        assert cluster.evict("blobs-trainer-0")
        assert not cluster.evict("blobs-trainer-1")
    cluster.until(lambda: cluster.ready("trainer") == 2)
    assert cluster.job("blobs-trainer").ignored == 1
    assert cluster.evict("blobs-trainer-1")
