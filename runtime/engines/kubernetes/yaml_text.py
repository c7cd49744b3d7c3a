"""Objects of Kubernetes as YAML that every parser reads alike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from graphft.errors import UsageError
from graphft.runtime.engines.kubernetes.cluster_job import Object

_NUMBER_LIKE = re.compile(r"[-+]?\.?[0-9][-+.0-9a-foxtz_: ]*|[-+]?\.(inf|nan)", re.IGNORECASE)
"""Also what is a time, or has another base than ten."""
_WORDS = ("y", "n", "yes", "no", "on", "off", "true", "false", "null", "~")


def to_yaml(objects: Sequence[Object]) -> str:
    """One document each. Raises UsageError without PyYAML."""
    try:
        import yaml
    except ImportError:
        raise UsageError(
            "manifests are written with PyYAML, which is not installed",
            rule="missing-package",
            help="pip install 'graphft[kubernetes]'",
        ) from None

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    def text(dumper: Any, data: str) -> Any:
        """PyYAML quotes what YAML 1.1 takes for something else, and `1e3` is a text there. For kubectl it is not."""
        style = "'" if _NUMBER_LIKE.fullmatch(data) or data.lower() in _WORDS else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    Plain.add_representer(str, text)
    return str(yaml.dump_all(objects, Dumper=Plain, sort_keys=False, width=1 << 20))
