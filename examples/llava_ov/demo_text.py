"""Real text that every machine has: documentation of Python's library and licences of installed packages."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
import types
from dataclasses import dataclass

#: Modules of the standard library with long docstrings.
MODULES = (
    "argparse",
    "ast",
    "bisect",
    "calendar",
    "collections",
    "configparser",
    "contextlib",
    "copy",
    "csv",
    "datetime",
    "decimal",
    "difflib",
    "enum",
    "fractions",
    "functools",
    "glob",
    "heapq",
    "html",
    "inspect",
    "itertools",
    "json",
    "logging",
    "math",
    "pathlib",
    "pickle",
    "queue",
    "random",
    "shutil",
    "statistics",
    "string",
    "subprocess",
    "tempfile",
    "textwrap",
    "threading",
    "timeit",
    "uuid",
    "weakref",
    "zipfile",
)
#: Packages that the demo installs, for their licence texts.
PACKAGES = ("click", "megatron-core", "numpy", "scikit-image", "scikit-learn", "scipy", "torch", "tqdm", "webdataset")

#: Shorter texts say too little.
MIN_CHARS = 60
#: Some licence files list those of all bundled libraries.
MAX_LINES = 400


@dataclass(frozen=True)
class Document:
    """A named text, as non-empty lines of printable ASCII."""

    title: str
    lines: tuple[str, ...]


def collect_documents() -> list[Document]:
    """All texts of at least `MIN_CHARS` characters, each once, in an order that depends on nothing but them.

    The texts are those of the installed Python and packages, so other versions give other samples.

    Raises:
        RuntimeError: Python runs with -OO, which removes all docstrings.
    """
    named = [*_docstrings(), *_licences()]
    if not any(title.startswith("`") for title, _ in named):
        raise RuntimeError("no docstring was found; run without -OO and PYTHONOPTIMIZE=2, which remove them")
    documents: dict[tuple[str, ...], Document] = {}
    for title, text in named:
        lines = tuple(line.rstrip() for line in text.expandtabs(4).splitlines() if line.strip())
        lines = tuple(line for line in lines if line.isascii() and line.isprintable())[:MAX_LINES]
        if sum(map(len, lines)) >= MIN_CHARS:
            documents.setdefault(lines, Document(title, lines))
    return list(documents.values())


def _docstrings() -> list[tuple[str, str]]:
    """Docstrings of the modules, and of their public classes, methods and functions."""
    found = []
    for name in MODULES:
        module = importlib.import_module(name)
        found.append((f"`{name}`", inspect.getdoc(module) or ""))
        for attribute, member in sorted(vars(module).items()):
            own = getattr(member, "__module__", None) == name and not attribute.startswith("_")
            if not own or not isinstance(member, (type, types.FunctionType, types.BuiltinFunctionType)):
                continue
            found.append((f"`{name}.{attribute}`", inspect.getdoc(member) or ""))
            if isinstance(member, type):
                found += [
                    (f"`{name}.{attribute}.{method}`", inspect.getdoc(function) or "")
                    for method, function in sorted(vars(member).items())
                    if isinstance(function, types.FunctionType) and not method.startswith("_")
                ]
    return found


def _licences() -> list[tuple[str, str]]:
    """Licence files of the packages that are installed, without those of libraries bundled in them."""
    found = []
    for package in PACKAGES:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in sorted(files, key=str):
            if re.search(r"\.dist-info/(licenses/)?(LICEN[CS]E|COPYING)[^/]*$", str(file)):
                found.append((f"the licence of {package}", file.read_text(encoding="utf-8")))
    return found
