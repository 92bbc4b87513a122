"""The proxy of Pathways as the environment names it: its address, how long to wait, and what to say
if it does not answer. Nothing of Pathways is imported here."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

import jax

_TIMEOUT = "PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS"
_CONNECT_SECONDS = 60.0
_MOST_SECONDS = 2**31 - 1
"""As many as a client of the proxy can wait."""
_INSECURE = "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"
_EXAMPLE = "JAX_BACKEND_TARGET=grpc://127.0.0.1:29000"


def proxy_address(environment: Mapping[str, str], platforms: str | None) -> str:
    """The address of the proxy that the environment names, `grpc://HOST:PORT`.

    Raises:
        ValueError: it names none.
    """
    if "proxy" not in (platforms or "").split(","):
        raise ValueError(
            f"JAX_PLATFORMS={platforms or ''}: Pathways is reached through a proxy: set "
            f"JAX_PLATFORMS=proxy, and {_EXAMPLE} to its address"
        )
    target = environment.get("JAX_BACKEND_TARGET", "")
    parts = urlsplit(target)
    if parts.scheme != "grpc" or not parts.hostname or not _port(target):
        raise ValueError(
            f"JAX_BACKEND_TARGET={target}: give the address of the Pathways proxy, such as "
            f"{_EXAMPLE}"
        )
    return target


def _port(target: str) -> int | None:
    try:
        return urlsplit(target).port
    except ValueError:  # no number, or above 65535
        return None


def proxy_timeout(environment: Mapping[str, str]) -> float:
    """Seconds that the proxy has to answer."""
    text = environment.get(_TIMEOUT) or str(int(_CONNECT_SECONDS))
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_SECONDS:
        raise ValueError(
            f"{_TIMEOUT}={text}: use a whole number of seconds, 1 or more, up to {_MOST_SECONDS}"
        )
    return float(text)


def await_port(target: str, give_up: float) -> None:
    """Wait until somebody listens there; the client of the proxy would wait in C++.

    Raises:
        ValueError: nobody does by `give_up`, on the monotonic clock.
    """
    parts = urlsplit(target)
    assert parts.hostname and parts.port
    while True:
        try:
            left = max(give_up - time.monotonic(), 0.1)
            socket.create_connection((parts.hostname, parts.port), timeout=left).close()
            return
        except UnicodeError:  # of a label that DNS does not have; it is a ValueError
            raise ValueError(
                f"JAX_BACKEND_TARGET={target}: {parts.hostname} is no host name: give the address "
                f"of the Pathways proxy, such as {_EXAMPLE}"
            ) from None
        except OSError as error:
            if time.monotonic() + 0.2 > give_up:
                why = error.strerror or str(error)
                raise ValueError(silent(target, why, proxy_timeout(os.environ))) from error
            time.sleep(0.2)


def silent(target: str, why: str, seconds: float) -> str:
    """What to say of a proxy that did not answer within so many seconds."""
    return (
        f"JAX_BACKEND_TARGET={target}: the Pathways proxy does not answer ({why}): see whether it "
        f"runs there, or give it more than {_TIMEOUT}={seconds:g}"
    )


@contextlib.contextmanager
def client_deadline(seconds: float) -> Iterator[None]:
    """The client tries for so long, whatever it is answered, and then tells why."""
    before = os.environ.get(_TIMEOUT)
    os.environ[_TIMEOUT] = str(round(seconds))
    try:
        yield
    finally:
        os.environ.pop(_TIMEOUT)
        os.environ |= {} if before is None else {_TIMEOUT: before}


def no_devices(target: str, message: str, seconds: float) -> str:
    """Why JAX has no devices, from its message: `seconds` were not enough, or they are no remedy,
    since the proxy is not spoken to as it wants, or is that of another JAX."""
    message = message.removeprefix("Unable to initialize backend 'proxy': ")
    code, _, rest = message.partition(": ")
    why = rest.partition("detailed error: ")[2].partition(" (set JAX_PLATFORMS")[0]
    if not why or code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
        return silent(target, why or message, seconds)
    remedy = (
        f"set {_INSECURE}=true, which Pathways' proxy has too"
        if "credentials" in why.lower()
        else "install the JAX that its servers were built with, or start servers built with this"
    )
    return (
        f"JAX_BACKEND_TARGET={target}: JAX {jax.__version__} has no connection to the Pathways "
        f"proxy ({why}): {remedy}"
    )
