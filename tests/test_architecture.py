"""Rooms import what is below them, and a wheel holds the package. See docs/architecture.md."""

from __future__ import annotations

import ast
import configparser
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import networkx
import pytest

import graphft
from tests.support.sources import FOLDERS, ROOT, name_of, sources, tree

MAX_LINES = 500
PRODUCT_LINES, PRODUCT_MODULES, TEST_LINES, DOC_WORDS = 45_660, 290, 38_000, 30_000
"""The house weighs at most this: who adds to it writes the decision down here. To 45,000 lines of product
accelerators added 120, what other processes know of a script and output that blocks 130,
the gradient scaler 140, the machines and versions that people have 27,
a Dataset that is the same in every process 60, keys, sealed messages and etcd's users 340."""
PRODUCT_SUFFIXES = (".py", ".js", ".css", ".html", ".sh", ".yaml")
GENERATED_DOCS = ("ops.md", "options.md")
# What a protocol's state machine may use: no clock, no randomness, no threads, no I/O, no tensors.
PURE = frozenset(
    {
        "__future__",
        "abc",
        "bisect",
        "collections",
        "copy",
        "dataclasses",
        "enum",
        "fractions",
        "functools",
        "hashlib",
        "heapq",
        "hmac",
        "itertools",
        "json",
        "math",
        "operator",
        "re",
        "string",
        "struct",
        "types",
        "typing",
        "zlib",
        "msgspec",
        "numpy",
        "typing_extensions",
        "graphft.errors",
        "graphft.ir",
        "graphft.options",
        "graphft.dataset",
        "graphft.plan",
        "graphft.runtime.protocol",
        "graphft.transpiler.criteria",
    }
)
UNSAFE_MODULES = frozenset({"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"})
UNSAFE_CALLS = frozenset({"torch.load", "torch.save"})


def imports(path: Path, *, top_level: bool = False, at_run_time: bool = False) -> Iterator[tuple[int, str]]:
    """(line, module) of every import; with `top_level`, of those that run when the module is imported; with
    `at_run_time`, of those that ever run: not of what stands for the type checker."""
    nodes: list[ast.AST] = [tree(path)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative import; import by full name"
            yield node.lineno, str(node.module)
            # `from graphft import ops` imports graphft.ops as well
            yield from ((node.lineno, f"{node.module}.{a.name}") for a in node.names)
        elif (top_level and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))) or (
            (top_level or at_run_time) and _type_checking(node)
        ):
            continue
        nodes.extend(ast.iter_child_nodes(node))


def _type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def within(module: str, *packages: str) -> bool:
    return any(module == p or module.startswith(p + ".") for p in packages)


def violations(paths: list[Path], *forbidden: str, top_level: bool = False) -> list[str]:
    assert paths, "no files found: the layout has changed"
    return [
        f"{name_of(p)}:{line} imports {module}"
        for p in paths
        for line, module in imports(p, top_level=top_level)
        if within(module, *forbidden)
    ]


def test_core_does_not_import_its_siblings() -> None:
    core = [p for p in sources("graphft") if p.name not in ("__init__.py", "__main__.py")]
    assert not violations(core, "graphft.ops", "graphft.transpiler", "graphft.runtime", top_level=True)


def test_ops_import_neither_runtime_nor_transpiler() -> None:
    assert not violations(sources("ops"), "graphft.runtime", "graphft.transpiler")


def test_transpiler_does_not_import_runtime() -> None:
    assert not violations(sources("transpiler"), "graphft.runtime")


def test_protocol_is_pure() -> None:
    impure = []
    protocol = [*sources("runtime/protocol"), ROOT / "graphft" / "plan.py", ROOT / "transpiler" / "criteria.py"]
    for path in protocol:
        for line, module in imports(path, top_level=True):
            if not (within(module, *PURE) or any(within(p, module) for p in PURE)):
                impure.append(f"{name_of(path)}:{line} imports {module}")
    assert not impure
    assert not violations(protocol, "zmq", "etcd3", "threading", "time", "random", "torch")


def test_names_that_tests_and_benchmarks_import_exist() -> None:
    """Types are checked in the package alone; a name that has moved would else show in a benchmark a month later."""
    missing = []
    for path in sources("tests", "benchmarks", "examples"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and within(str(node.module), "graphft"):
                missing += [
                    f"{name_of(path)}:{node.lineno}: {node.module} has no {alias.name}"
                    for alias in node.names
                    if not _importable(str(node.module), alias.name)
                ]
    assert not missing


def _importable(module: str, name: str) -> bool:
    if importlib.util.find_spec(module) is None:
        return False
    return hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}") is not None


def modules() -> dict[str, Path]:
    """The package's modules by full name, graphft/ops and its likes where they really are."""
    found = {}
    for path in sources(*FOLDERS):
        parts = path.relative_to(ROOT).with_suffix("").parts
        full = ".".join(parts if parts[0] == "graphft" else ("graphft", *parts))
        found[full.removesuffix(".__init__")] = path
    return found


def test_no_imports_in_a_circle() -> None:
    """Not even inside functions: what stands below knows nothing of what stands above."""
    known, graph = modules(), networkx.DiGraph()
    for name, path in known.items():
        parts = name.split(".")
        own = {".".join(parts[:n]) for n in range(1, len(parts))}  # the packages that it is in
        for _, module in imports(path, at_run_time=True):
            package = module.rpartition(".")[0]
            if module in known and module not in own | {name}:
                graph.add_edge(name, module)
            elif package in own and module not in known:  # a name that the package has from one of its modules
                graph.add_edge(name, package)
    assert not [sorted(circle) for circle in networkx.strongly_connected_components(graph) if len(circle) > 1]


FEATURES = {
    "validation": (
        "runtime.validation",
        "runtime.roles.trainer.validator",
        "transpiler.validation",
        "transpiler.evaluation",
        "transpiler.passes.validation",
    ),
    "coordinator": (
        "runtime.roles.coordinator",
        "runtime.queue.coordinator_queue",
        "runtime.queue.task_client",
        "runtime.queue.task_loop",
        "runtime.protocol.task_queue",
        "runtime.protocol.task_events",
    ),
    "page": ("runtime.page",),
    "prediction": ("runtime.prediction", "transpiler.prediction"),
    "replay": ("runtime.replay",),
    "chaos": ("runtime.chaos",),
}
"""The modules of each optional feature."""


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_is_imported_by_few(feature: str) -> None:
    known, rooms = modules(), [f"graphft.{room}" for room in FEATURES[feature]]
    assert all(room in known for room in rooms), "the layout has changed"
    outside = {name: path for name, path in known.items() if not within(name, *rooms)}
    assert len({name for name, path in outside.items() if any(within(m, *rooms) for _, m in imports(path))}) <= 15


ROOMS = (
    "fs",
    "process",
    "protocol",
    "etcd",
    "transport",
    "execute",
    "data",
    "coordination",
    "callbacks",
    "checkpoint",
    "queue",
    "validation",
    "roles",
    "engines",
    "page",
    "launcher",
    "replay",
    "chaos",
    "loop",
    "interchange",
    "driver",
    "prediction",
)
"""The rooms of runtime/, from below: each may import those before it. What stands in no room is above all of them."""


def test_rooms_import_what_is_below_them() -> None:
    rooms = {p.parent.name for p in (ROOT / "runtime").glob("*/__init__.py")}
    assert rooms == set(ROOMS)
    upwards = []
    for number, room in enumerate(ROOMS):
        above = [f"graphft.runtime.{other}" for other in ROOMS[number + 1 :]]
        for path in sources(f"runtime/{room}"):
            used = imports(path)  # those for the type checker as well
            lines = {
                line: module for line, module in used if within(module, *above)
            }  # a line imports more than one name
            upwards += [f"{name_of(path)}:{line} imports {module}" for line, module in lines.items()]
    assert not upwards, "a room imports what is above it: see the rooms' order in docs/architecture.md"


def classes(*folders: str) -> dict[str, ast.ClassDef]:
    nodes = [node for path in sources(*folders) for node in tree(path).body]
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def methods(node: ast.ClassDef) -> set[str]:
    return {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}


def test_ports_are_explicit() -> None:
    """`ctx.comm.push` leads to a class that says it is a CommPort, and has all of its methods."""
    ports = {name: methods(node) for name, node in classes("ops").items() if name.endswith("Port")}
    known = classes("runtime/queue", "runtime/roles")
    bases = {name: {ast.unparse(base) for base in node.bases} for name, node in known.items()}
    graph = networkx.DiGraph((name, base) for name in bases for base in bases[name])
    found, lacking = set(), []
    for name in known:
        above = networkx.descendants(graph, name) if name in graph else set()
        own = set().union(*(methods(known[n]) for n in above | {name} if n in known))
        abstract = any(name in others for others in bases.values())
        for port in above & ports.keys():
            found.add(port)
            lacking += [f"{name} lacks {method} of {port}" for method in ports[port] - own if not abstract]
    assert found == ports.keys()
    assert not lacking


def test_nothing_refers_back_to_its_role() -> None:
    back = re.compile(r"\bself\.(role|trainer|pserver|coordinator)\b|\bcast\(")
    found = [
        f"{name_of(path)}: {match[0]}" for path in sources("runtime/roles") for match in back.finditer(path.read_text())
    ]
    assert not found


def test_a_launcher_does_without_torch() -> None:
    """It loads while a user waits: torch takes a second or two, and only roles compute."""
    modules = "graphft.runtime.launcher.launch, graphft.runtime.launcher.display, graphft.runtime.cli"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_packages_are_imported_under_their_full_names() -> None:
    paths = sources(*FOLDERS, "tests", "examples")
    assert not violations(paths, "ops", "transpiler", "runtime")


def test_nothing_unpickles() -> None:
    # One file reads those of torch.distributed.checkpoint, by an unpickler that makes no object of a real class.
    read_by_list = ROOT / "runtime/interchange/distributed.py"
    # One file reads the user's module of a program with capture=False: it lies in the job's folder, as the script of
    # its Dataset does. Nothing that comes from the network, and no checkpoint, is read there.
    users_code = ROOT / "graphft/capture/module_pickle.py"
    paths = [p for p in sources(*FOLDERS, "examples") if p != users_code]
    found = violations([p for p in paths if p != read_by_list], *UNSAFE_MODULES)
    for path in paths:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in UNSAFE_CALLS:
                found.append(f"{name_of(path)}:{node.lineno} calls {ast.unparse(node.func)}")
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
                found.append(f"{name_of(path)}:{node.value.lineno} allows pickle")
    assert not found


def test_files_are_short() -> None:
    lengths = {name_of(p): len(p.read_text().splitlines()) for p in sources(*FOLDERS, "tests", "examples")}
    assert not {name: n for name, n in lengths.items() if n >= MAX_LINES}


def test_the_house_is_light() -> None:
    def lines(paths: Iterable[Path]) -> int:
        return sum(len(path.read_text().splitlines()) for path in paths)

    product = [Path(at, name) for f in FOLDERS for at, _, names in os.walk(ROOT / f) for name in names]
    words = [
        p.read_text().split()
        for p in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
        if p.name not in GENERATED_DOCS
    ]
    assert lines(path for path in product if path.suffix in PRODUCT_SUFFIXES) <= PRODUCT_LINES
    assert len(sources(*FOLDERS)) <= PRODUCT_MODULES
    assert lines([*sources("tests"), *(ROOT / "tests" / "golden").iterdir()]) <= TEST_LINES
    assert sum(map(len, words)) <= DOC_WORDS


def test_no_public_name_hides_a_module() -> None:
    """`graphft.x` would be the function or the module, depending on what was imported before."""
    modules = {p.stem for p in sources("graphft")} | set(FOLDERS[1:])
    public = {name: getattr(graphft, name) for name in graphft.__all__}
    assert not [name for name, value in public.items() if name in modules and not isinstance(value, ModuleType)]


# Distributions whose modules have other names.
MODULES = {"grpcio": "grpc", "pyzmq": "zmq", "protobuf": "google", "scikit-learn": "sklearn", "pyyaml": "yaml"}


def declared(section: str, key: str = "") -> set[str]:
    """Modules of the distributions that setup.cfg names: of `key` in `section`, or of all of it."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = "\n".join(v for k, v in config[section].items() if not key or k == key).splitlines()
    names = [re.split(r"[ <>=!]", line, maxsplit=1)[0] for line in lines if line and not line.startswith("#")]
    return {MODULES.get(n, n.replace("-", "_")) for n in names}


# What only the use of an extra loads: files whose names begin so, and what they may import.
BEHIND_EXTRAS = {"runtime/engines/ray_": {"ray"}}


def test_dependencies_are_declared() -> None:
    """A package that is imported when a module loads is required; what functions import may come with an extra."""
    required, extras = declared("options", "install_requires"), declared("options.extras_require")
    known = sys.stdlib_module_names | {"graphft"} | required
    for path in sources(*FOLDERS):
        for line, module in imports(path, top_level=True):
            extra = next((e for begin, e in BEHIND_EXTRAS.items() if name_of(path).startswith(begin)), set())
            assert module.split(".")[0] in known | extra, (
                f"{name_of(path)}:{line} needs {module}, which is not required"
            )
        for line, module in imports(path):
            assert module.split(".")[0] in known | extras, f"{name_of(path)}:{line} needs {module}, in no extra"


@pytest.mark.parametrize("folder", FOLDERS[1:])
def test_links_are_relative(folder: str) -> None:
    assert os.readlink(ROOT / "graphft" / folder) == f"../{folder}"


def test_every_folder_is_a_package() -> None:
    folders = {p.parent for p in sources(*FOLDERS)}
    assert not [name_of(f) for f in folders if not (f / "__init__.py").exists()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources: a build writes into its source folder."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy / file)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            str(out),
            str(copy),
        ],
        check=True,
        timeout=120,
    )
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_everything_under_graphft(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    packaged = {n for n in names if ".dist-info/" not in n}
    assert not [n for n in packaged if not n.startswith("graphft/")]
    core = {name_of(p) for p in sources("graphft")}
    siblings = {f"graphft/{name_of(p)}" for p in sources(*FOLDERS[1:])}
    kinds = {"page": ("html", "css", "js"), "engines": ("sh", "yaml")}
    others = {
        f"graphft/{name_of(p)}"
        for room in kinds
        for kind in kinds[room]
        for p in (ROOT / "runtime" / room).glob(f"*.{kind}")
    }
    assert len(others) == 6
    assert packaged == core | siblings | others | {"graphft/py.typed"}
    assert any(n.endswith("LICENSE") for n in names)


def test_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import graphft, graphft.ops, graphft.transpiler, graphft.runtime.protocol, graphft.runtime.data as d;"
        "print(graphft.__file__, d.__file__)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": "site"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert shown.returncode == 0, shown.stderr
    assert all(file.startswith(str(tmp_path)) for file in shown.stdout.split()), shown.stdout
