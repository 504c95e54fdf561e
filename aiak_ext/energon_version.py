"""Refuses versions of Energon whose wrapper interface is another one."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

MINIMUM = (7, 2)
BELOW = (8,)


def check_energon_version() -> None:
    """
    Raises:
        ImportError: Energon is missing, older than 7.2 or not below 8.
    """
    try:
        installed = version("megatron-energon")
    except PackageNotFoundError:
        raise ImportError("aiak_ext needs megatron-energon. Install 'megatron-energon>=7.2,<8'.") from None
    release = tuple(int(part) for part in installed.split(".")[:2] if part.isdigit())
    if not MINIMUM <= release < BELOW:
        raise ImportError(
            f"megatron-energon {installed} is installed, and aiak_ext works with 7.2 up to, not including, 8: other "
            "versions have another dataset wrapper interface, and a resume would lose samples. "
            "Install 'megatron-energon>=7.2,<8'."
        )
