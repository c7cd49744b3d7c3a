"""A client with the login and the certificates that the environment names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from graphft.runtime.etcd.client import Etcd

FOLLOW = "GRAPHFT_ETCD_FOLLOW"


def open_etcd(endpoints: Sequence[str], environ: Mapping[str, str] = os.environ) -> Etcd:
    """A client that has not connected yet.

    User, password and the files of TLS come from GRAPHFT_ETCD_USER, _PASSWORD, _CA, _CERT and _KEY (not from a command
    line, which everybody on the machine can read). GRAPHFT_ETCD_FOLLOW: not empty if its members may be replaced by
    others at other addresses, which they advertise.
    """
    user, password, ca, cert, key = (
        environ.get(f"GRAPHFT_ETCD_{name}") or None for name in ("USER", "PASSWORD", "CA", "CERT", "KEY")
    )
    return Etcd(endpoints, user, password, ca_cert=ca, cert_cert=cert, cert_key=key, follow=bool(environ.get(FOLLOW)))
