"""Objects that a user names on the command line as ``module:attribute``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def load_object(name: str) -> Any:
    """Import ``package.module:attribute``; the current folder is searched too, as with ``python -m``.

    Raises:
        ValueError: the name has another form, or the module or attribute does not exist.
    """
    module_name, separator, attribute = name.partition(":")
    if not (module_name and separator and attribute):
        raise ValueError(f"{name!r} does not name an object, so nothing can be imported; write package.module:Name")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"module {module_name!r} of {name!r} cannot be imported ({error}); run from the folder that holds it, or "
            "add that folder to PYTHONPATH"
        ) from error
    if not hasattr(module, attribute):
        raise ValueError(f"module {module_name!r} has no {attribute!r}; check the spelling of {name!r}")
    return getattr(module, attribute)


def load_instance(name: str) -> Any:
    """What a class or function named ``module:attribute`` gives when it is called without arguments.

    Raises:
        ValueError: as `load_object`, or the call needs arguments.
    """
    factory = load_object(name)
    try:
        return factory()
    except TypeError as error:
        raise ValueError(
            f"{name} cannot be called without arguments ({error}), so there is no instance to use; name a function "
            "that makes one"
        ) from error
