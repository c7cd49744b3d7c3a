"""Tells who a peer is: key pairs of processes, the proof at ZeroMQ's handshake, sealed messages.

Each process makes a Curve25519 key pair when it starts and writes its public key into its record in etcd, which is what
trust rests on. From the two keys of a connection's ends both derive the same three secrets (X25519, HKDF): the proof
that lets the client in, and one AES-256-GCM key for each direction. A header is encrypted, and so is a small frame; a
large one travels readable, and is authenticated with its header. Where both ends see that they are on one machine's
loopback, their connection is the kernel's to guard once they have proven who they are: behind the first messages the
others go as they are. ZeroMQ's own CURVE encrypts every byte with XSalsa20: an echo of 8 MB then runs at 0.22 of its
speed.
"""

from __future__ import annotations

import itertools
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from graphft.runtime.transport.address import is_loopback, network_digest, split_endpoint

NONCE, LENGTH = struct.Struct(">IQ"), struct.Struct(">I")
"""A message's number is AES-GCM's nonce, behind 1 in what a server sends on its own machine, else 0: it begins with a
zero, as no header does. Behind the header stands one more than the length of the frame that is encrypted with it; 0
without one."""
NONE = LENGTH.pack(0)
OVERHEAD = NONCE.size + LENGTH.size + 16
"""Bytes by which a sealed message is longer than its header and inner frame."""


class Forged(Exception):
    """The error of a message that the peer of this channel has not sent, or that has arrived before."""


class KeyPair:
    """Holds a process's Curve25519 keys, never written down. `public`: in hexadecimal, for its record in etcd."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.from_private_bytes(secrets.token_bytes(32))
        self.public = self._private.public_key().public_bytes_raw().hex()
        self._connections = itertools.count(1)

    def connection(self, identity: str, address: str) -> bytes:
        """Returns the name of a new connection to a server, which no other connection has, of any keys: with a number,
        and the client's network, if the server is in it as far as the client can see."""
        near = network_digest() if is_loopback(split_endpoint(address)[0]) else ""
        return f"{identity[-100:]}-{self.public[:12]}#{next(self._connections)}@{near}".encode("ascii", "replace")

    def channel(self, peer: str, connection: bytes, *, server: bool) -> Channel:
        """Returns this process's end of a connection. `peer`: public key of the other end. `connection`: the name that
        the client gives it, another one each time. `server`: this end is the server's."""
        shared = self._private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(peer)))
        ends = [self.public, peer] if server else [peer, self.public]
        derived = HKDF(SHA256(), 96, salt=connection, info="".join(["graphft", *ends]).encode()).derive(shared)
        to_server, to_client = AESGCM(derived[32:64]), AESGCM(derived[64:])
        return Channel(derived[:32].hex(), to_client if server else to_server, to_server if server else to_client)


class Channel:
    """Seals and opens messages at one end of a connection. `proof` shows the server that the client has the key that
    it names. `near`: a client's server is on its machine, as far as it can see. `local`: the peer is, and has proven
    who it is, and its messages need not be sealed any more; `bare`: nor those to it."""

    __slots__ = ("_opener", "_received", "_sealer", "_sent", "bare", "local", "near", "proof")

    def __init__(self, proof: str, sealer: AESGCM, opener: AESGCM) -> None:
        self.proof = proof
        self._sealer, self._opener = sealer, opener
        self._sent = self._received = 0
        self.bare = self.local = self.near = False

    def seal(self, header: bytes, inner: memoryview | None, outer: memoryview | None) -> bytes:
        """Returns the header and the `inner` frame encrypted; the `outer` one is authenticated with them."""
        self._sent += 1
        nonce = NONCE.pack(self.local, self._sent)
        plain = header + NONE if inner is None else b"".join([inner, header, LENGTH.pack(inner.nbytes + 1)])
        return nonce + self._sealer.encrypt(nonce, plain, outer)

    def open(self, header: memoryview, outer: memoryview | None) -> tuple[memoryview, memoryview | None]:
        """Returns header and frame of a message of the peer's. Raises Forged."""
        if self.local and header.nbytes and header[0]:
            self.bare = True  # the client knows by now who this server is
            return header, outer
        try:
            nonce = header[: NONCE.size].tobytes()
            agrees, number = NONCE.unpack(nonce)
            if number <= self._received:
                raise Forged(f"number {number} after {self._received}: it has arrived before")
            plain = self._opener.decrypt(nonce, header[NONCE.size :], outer)
        except (InvalidTag, ValueError, struct.error) as error:
            raise Forged(f"not sealed with the peer's key: {error!r}") from None
        self._received = number
        if agrees and self.near:
            self.local = self.bare = True
        if plain.endswith(NONE):
            return memoryview(plain)[: -LENGTH.size], outer
        view = memoryview(bytearray(plain))  # torch shares no memory that cannot be written
        (length,) = LENGTH.unpack(view[-LENGTH.size :])
        return view[length - 1 : -LENGTH.size], view[: length - 1]


@dataclass(frozen=True, slots=True)
class Login:
    """Holds this process's keys, and says which public keys of others it lets in."""

    keys: KeyPair = field(default_factory=KeyPair, repr=False)
    admits: Callable[[str], bool] = lambda _: False

    def accept(self, name: str) -> tuple[str, int, Channel] | None:
        """Returns the public key and the connection's number that a client names at the handshake, and the server's end
        of it; None if that key is not let in."""
        public, _, connection = name.partition(":")
        number = connection.rpartition("#")[2].partition("@")[0]
        if not self.admits(public) or not (number.isascii() and number.isdigit()):
            return None
        return public, int(number), self.keys.channel(public, connection.encode(), server=True)
