"""Who may use a port: the token that each client has, and the origins of web pages."""

from __future__ import annotations

import contextlib
import hmac
import importlib.util
import os
import pathlib
import re
import secrets
import stat
from typing import NamedTuple

from jaxrl_dist.checks import install_extra, shown
from jaxrl_dist.envs.wire.encoding import WireError
from jaxrl_dist.errors import ConfigError, say

MIN_TOKEN = 16
"""Characters of a token, at least."""
MAX_TOKEN = 1000


class Access(NamedTuple):
    """Who may use a port."""

    token: str
    """What each client sends: in the header ``Authorization: Bearer TOKEN``, or as ``token`` in
    the first message of a web socket."""
    origins: tuple[str, ...] = ()
    """Origins of pages that may connect, such as ``https://example.org``, besides the port's own;
    ``null`` is a page from a file."""

    flag: str = "--allow-origin "
    """How the user allows an origin, which follows."""

    def check_token(self, token: object) -> None:
        """Refuses a token that is not this one; equal beginnings take no longer.

        Raises:
          WireError: it is another.
        """
        given = token if isinstance(token, str) else ""
        if not hmac.compare_digest(_bytes(given), _bytes(self.token)):
            raise WireError(
                "the token is missing or wrong; send the header Authorization: Bearer TOKEN, or "
                '{"token": TOKEN} as the first message of a web socket',
                401,
            )

    def check_header(self, authorization: str) -> None:
        """As ``check_token``, for the header ``Authorization``."""
        scheme, _, token = authorization.partition(" ")
        self.check_token(token.strip() if scheme.lower() == "bearer" else None)

    def check_origin(self, origin: str | None, own: str) -> None:
        """Refuses pages from elsewhere: a browser names the origin of a page.

        Args:
          origin: the header ``Origin``; None: no browser has sent it.
          own: the origin of this port, as the client has addressed it.

        Raises:
          WireError: the page is from elsewhere.
        """
        if origin not in (None, own, *self.origins):
            raise WireError(
                f"pages from {shown(origin)} may not connect; start it with "
                f"{self.flag}{origin:.60}",
                403,
            )


def _bytes(text: str) -> bytes:
    # JSON and headers may hold halves of pairs, which UTF-8 lacks
    return text.encode("utf-8", "surrogatepass")


def check_origins(origins: tuple[str, ...]) -> None:
    """Checks what ``--allow-origin`` names.

    Raises:
      ConfigError: it is not an origin.
    """
    for origin in origins:
        if origin != "null" and not re.fullmatch(r"https?://[^/\s*]+", origin):
            raise ConfigError(
                f"is not the origin of a page: {shown(origin)}; name one such as "
                "https://example.org or http://localhost:8000, or null for a page from a file",
                "allow_origin",
            )


def find_token(file: str | None) -> str:
    """Returns the token; warns of a file that others can read.

    Args:
      file: a file that holds it, or that is written with mode 0600 if there is none; None: it is
        made at random.

    Raises:
      ConfigError: the file holds no token, or cannot be read or written.
    """
    made = secrets.token_urlsafe(24)
    if file is None:
        return made
    try:
        with contextlib.suppress(FileExistsError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with os.fdopen(os.open(file, flags, 0o600), "w", encoding="ascii") as content:
                content.write(f"{made}\n")
            return made
        if not pathlib.Path(file).is_file():
            raise ConfigError(f"{file} is not a file; name another", "token_file")
        with open(file, "rb") as content:
            token = content.read(MAX_TOKEN + 2).rstrip(b"\r\n")
            others = stat.S_IMODE(os.fstat(content.fileno()).st_mode) & 0o077
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; name another file", "token_file") from None
    if not re.fullmatch(rb"[!-~]{%d,%d}" % (MIN_TOKEN, MAX_TOKEN), token):
        raise ConfigError(
            f"{file} does not hold a token, one line of {MIN_TOKEN} to {MAX_TOKEN} printable "
            "characters without spaces; delete it, and a new one is written",
            "token_file",
        )
    if others:
        say(f"warning: others can read the token in {file}; run chmod 600 {file}")
    return token.decode("ascii")


def check_installed(what: str) -> None:
    """Checks that the packages of the extra ``serve`` are here.

    Raises:
      ConfigError: one is missing; ``what`` needs it.
    """
    for package in ("aiohttp", "msgpack"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{what} needs {package}, which is not installed: {install_extra('serve')}"
            )
