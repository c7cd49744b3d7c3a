"""`python -m graphft.runtime.etcd.server --fetch DIR`: make sure that a usable etcd is there; a step of set-up."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from graphft.errors import GraphftError
from graphft.runtime.etcd.binary import provide_etcd


def main(argv: Sequence[str] | None = None) -> int:
    """`--fetch DIR`: print where the usable etcd is, after fetching one into DIR if there was none."""
    parser = argparse.ArgumentParser(prog="python -m graphft.runtime.etcd.server", description=main.__doc__)
    parser.add_argument("--fetch", metavar="DIR", type=Path, required=True, help="where to unpack etcd, e.g. .etcd")
    args = parser.parse_args(argv)
    args.fetch.mkdir(parents=True, exist_ok=True)
    try:
        binary = provide_etcd(args.fetch)
    except GraphftError as e:
        print(e, file=sys.stderr)
        return 1
    print(f"etcd {'.'.join(map(str, binary.version))}: {binary.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
