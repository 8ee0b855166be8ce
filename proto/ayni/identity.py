"""Which worker names a client certificate allows.  [core]

A certificate is made for a machine, and a machine may run several workers. So a certificate with the name "ant" allows
the workers "ant" and "ant-4711": the name itself, or the name, a dash and anything more. A name that is not to be
allowed by another one must not begin with it and a dash.
"""

from collections.abc import Sequence

from ayni.errors import IdentityRefused

_SHOWN = 8
"""Names that a refusal quotes."""


def check_identity(worker_name: str, certificate_names: Sequence[str]) -> None:
    """Compares a worker's name with the names in its certificate.

    Raises:
        IdentityRefused: none of them allows it.
    """
    if any(_allows(name, worker_name) for name in certificate_names):
        return
    named = ", ".join(certificate_names[:_SHOWN]) or "nobody"
    raise IdentityRefused(
        f"the client certificate is of {named} and does not allow the worker name {worker_name!r}; give --name one of "
        "these names, alone or followed by a dash and more, or give a certificate of this name "
        "(scripts/make_certs.py --worker NAME makes one)",
        worker_name=worker_name,
        certificate=named,
    )


def _allows(name: str, worker_name: str) -> bool:
    return bool(name) and (worker_name == name or worker_name.startswith(f"{name}-"))
