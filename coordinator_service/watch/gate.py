"""Who may see the dashboard, and who may press its buttons.  [core]

The token travels in a header, which no other site can make a browser send, so there are no cookies and nothing to
forge. On loopback whoever is on this host may look; the name that the browser asked for must be this host's as well, or
a site could point a name of its own here and read along.
"""

import hmac
from dataclasses import dataclass, field

from ayni.endpoints import Address, parse_address
from ayni.settings import SettingsError

_SCHEME = "bearer "


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """Checks callers."""

    token: str = field(repr=False)
    is_loopback: bool
    """Whether the dashboard listens on loopback."""

    def may_act(self, authorization: str) -> bool:
        """Says whether a caller may press buttons, by its authorization header."""
        if not authorization.lower().startswith(_SCHEME):
            return False
        given = authorization[len(_SCHEME) :].strip()
        return hmac.compare_digest(given.encode(errors="surrogateescape"), self.token.encode())

    def may_read(self, authorization: str, host: str) -> bool:
        """Says whether a caller may see the run, by its authorization and host headers."""
        return self.may_act(authorization) or (self.is_loopback and _is_this_host(host))


def _is_this_host(host: str) -> bool:
    return any(_is_loopback(text) for text in (host, f"{host}:80"))


def _is_loopback(text: str) -> bool:
    try:
        address: Address = parse_address(text)
    except SettingsError:
        return False
    return address.is_loopback
