"""The job's secret: given, or from the environment."""

from __future__ import annotations

from verl_fl import _env
from verl_fl._errors import explain


def job_secret(given: bytes | str | None) -> bytes:
    """The secret as bytes.

    Raises:
        ValueError: there is none, or it is too short to be one.
    """
    secret = given if given is not None else _env.read(_env.SECRET)
    secret = secret.encode() if isinstance(secret, str) else bytes(secret)
    if len(secret) < 8:
        raise ValueError(
            explain(
                "weight sync needs a secret that both ends share" if not secret else "this secret is too short",
                asked=f"{len(secret)} bytes",
                legal="8 bytes or more, the same on both ends",
                fix=f"pass secret=..., or set {_env.SECRET} (`python -c 'import secrets; print(secrets.token_hex())'`)",
            )
        )
    return secret
