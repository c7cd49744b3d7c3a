"""Fills in the templates of commands that print how another machine runs a saved job, or a script.

A template is a file beside the code that a person can read and copy, filled in line by line. `{{name}}` stands for a
value. A line that is nothing but a placeholder stands for the lines of its value, indented as it is. A line that ends
in `#? name` stays only if that value is not empty, and so does a whole document of YAML that begins with such a line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from graphft.errors import UsageError
from graphft.runtime.etcd.channel import parse_endpoint
from graphft.runtime.transport.address import WILDCARDS, is_loopback

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_BLOCK = re.compile(r"( *)\{\{(\w+)\}\}")
_ONLY_IF = re.compile(r" *#\? (\w+)$")
_BETWEEN = "---\n"
"""Stands between documents of YAML."""


def fill(file: Path, values: Mapping[str, object]) -> str:
    """Returns the text of a template with these values."""
    documents = []
    for document in file.read_text(encoding="utf-8").split(_BETWEEN):
        first, _, rest = document.partition("\n")
        only_if = _ONLY_IF.fullmatch(first)
        if only_if is None or values[only_if[1]]:
            documents.append("".join(_lines(document if only_if is None else rest, values)))
    return _BETWEEN.join(documents)


def _lines(text: str, values: Mapping[str, object]) -> list[str]:
    lines = []
    for line in text.splitlines():
        if only_if := _ONLY_IF.search(line):
            if not values[only_if[1]]:
                continue
            line = line[: only_if.start()]
        if block := _BLOCK.fullmatch(line):
            lines += [f"{block[1]}{inner}\n" for inner in str(values[block[2]]).splitlines()]
        else:
            lines.append(_PLACEHOLDER.sub(lambda found: str(values[found[1]]), line) + "\n")
    return lines


def check_endpoints(etcd: str) -> None:
    """Raises UsageError for an etcd that other machines do not reach; "": none is given."""
    hosts = {e: parse_endpoint(e).host for e in etcd.split(",")} if etcd else {}
    local = [e for e, host in hosts.items() if is_loopback(host) or host in WILDCARDS]
    if local:
        raise UsageError(
            f"etcd at {', '.join(local)} is out of reach: on each machine that is the machine itself",
            rule="etcd-endpoints",
            help="give --etcd the address that all machines reach it at",
        )
