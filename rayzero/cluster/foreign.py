"""Join a Ray cluster that others started, after a look whether it is there at all.

Ray itself takes two minutes to give up on an address where nothing answers.

[Note: tokens]
`ray start` protects a cluster with the user's token if there is one; ray.init(address) uses it only
where RAY_AUTH_MODE says so. Both sides must agree: without it a protected cluster refuses us, with
it the ranks of an open cluster never start. So the cluster is asked once, before Ray is.
"""

import contextlib
import logging
import os
import socket

import ray
from ray._private.authentication.authentication_token_setup import (
    maybe_enable_token_auth_if_token_available,
)

from rayzero.errors import ClusterError

PROBE_S = 3.0
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_EMPTY_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS_TYPE = 4


def join(address: str) -> None:
    """Connect to the cluster at host:port; raise ClusterError within seconds if that cannot be."""
    _probe(address)
    if "RAY_AUTH_MODE" not in os.environ and _wants_token(address):
        maybe_enable_token_auth_if_token_available()
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"cluster.address={address}: Ray answers but this process cannot join it: {error}. "
            "Run rayzero on one of its nodes, with the same versions of Ray and Python; if the "
            "cluster asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
        ) from error


def _wants_token(address: str) -> bool:
    """Tell whether the cluster refuses a client without token. See [Note: tokens]."""
    try:
        ray._raylet.GcsClient(address=address)
    except ray.exceptions.AuthenticationError:
        return True
    return False


def _probe(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise ClusterError(
            f"cluster.address={address} must be HOST:PORT of the head node, such as 10.0.0.1:6379"
        )
    try:
        answer = _greet(host.strip("[]"), int(port))
    except OSError as error:
        raise ClusterError(
            f"cluster.address={address}: no Ray cluster answers there ({error}); "
            "start one with `ray start --head`, correct the address, or use cluster=local"
        ) from error
    if answer[3:4] != bytes([_SETTINGS_TYPE]):
        raise ClusterError(
            f"cluster.address={address}: something answers there, but it is not a Ray head node; "
            "use the address that `ray start --head` printed (its port is 6379 by default)"
        )


def _greet(host: str, port: int) -> bytes:
    """Open an HTTP/2 connection, as gRPC does, and return the first frame's head (9 bytes)."""
    answer = b""
    with socket.create_connection((host, port), timeout=PROBE_S) as connection:
        connection.sendall(_HTTP2_PREFACE + _EMPTY_SETTINGS)
        with contextlib.suppress(TimeoutError):
            while len(answer) < 9 and (part := connection.recv(9 - len(answer))):
                answer += part
    return answer
