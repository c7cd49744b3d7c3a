"""`graphft etcd`: which etcd is used, getting one, and running one for the processes of several machines."""

from __future__ import annotations

import argparse
import re
import signal
import socket
import sys
from pathlib import Path

from graphft.errors import UsageError
from graphft.runtime.process.interrupts import Asked
from graphft.runtime.process.role_process import EXIT_OK

LOOK_SECONDS = 0.5


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    etcd = commands.add_parser(
        "etcd", help="which etcd is used where none is given; --install gets one, --serve runs it"
    )
    etcd.add_argument("--install", action="store_true", help="get one, if there is none that keeps what it is told")
    etcd.add_argument("--to", metavar="DIR", type=Path, help="where --install puts it (default: your cache)")
    etcd.add_argument("--serve", action="store_true", help="run one until SIGTERM or Ctrl-C, and print its endpoint")
    etcd.add_argument("--data", metavar="DIR", type=Path, help="(--serve) where its data and its log are")
    etcd.add_argument(
        "--listen",
        metavar="HOST[:PORT]",
        help="(--serve) this machine's address or name for others (default: loopback)",
    )
    etcd.set_defaults(command=_etcd)


def _etcd(options: argparse.Namespace) -> int:
    from graphft.runtime.etcd.embedded import cache_dir, find_etcd, install_etcd, version_of

    for option, of in (("to", "install"), ("data", "serve"), ("listen", "serve")):
        if getattr(options, option) is not None and not getattr(options, of):
            raise UsageError(f"--{option} is for --{of}", rule="usage", help="give both, or neither")
    if options.serve:
        return _serve(options)
    binary = install_etcd(options.to or cache_dir()) if options.install else find_etcd()
    print(f"etcd {version_of(binary)}: {binary}")
    return EXIT_OK


def _serve(options: argparse.Namespace) -> int:
    """The endpoint, alone, goes to stdout once it answers: a script reads it there."""
    from graphft.runtime.etcd import EmbeddedEtcd
    from graphft.runtime.etcd.channel import parse_endpoint
    from graphft.runtime.launcher.etcd_keeper import EtcdKeeper

    if options.install or options.data is None:
        raise UsageError("--serve goes with --data, without --install", rule="usage", help="name a folder: --data DIR")
    listen = options.listen or "127.0.0.1"
    at, chosen = parse_endpoint(listen), re.search(r":\d+$", listen)
    asked = Asked(signal.SIGTERM, signal.SIGINT)
    with EmbeddedEtcd(options.data, host=_address(at.host), port=at.port if chosen else 0) as server:
        print(server.endpoints[0], flush=True)
        print(f"etcd serves whoever reaches {server.endpoints[0]}; its data are in {options.data}", file=sys.stderr)
        keeper = EtcdKeeper(server)
        while not asked.wait(LOOK_SECONDS):
            keeper.step()
    return EXIT_OK


def _address(host: str) -> str:
    """etcd listens on addresses only. Of a name, one that other machines reach, if there is one."""
    try:
        found = [str(address[0]) for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError as error:
        raise UsageError(
            f"{host} is no name or address of this machine: {error}", rule="address", help="see `hostname -I`"
        ) from error
    return next((address for address in found if not address.startswith("127.")), found[0])
