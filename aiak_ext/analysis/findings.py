"""A finding of `aiak-ext doctor`, and how findings are printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LEVELS = ("error", "warning", "ok")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check. `remedy` is empty when nothing has to be done."""

    level: str
    check: str
    message: str
    remedy: str = ""


def ok(check: str, message: str) -> Finding:
    """A check that passed."""
    return Finding(level="ok", check=check, message=message)


def warning(check: str, message: str, remedy: str) -> Finding:
    """What costs time or memory, or may be wrong."""
    return Finding(level="warning", check=check, message=message, remedy=remedy)


def error(check: str, message: str, remedy: str) -> Finding:
    """What stops, hangs or falsifies a run."""
    return Finding(level="error", check=check, message=message, remedy=remedy)


def has_errors(findings: Sequence[Finding]) -> bool:
    """Whether a run with this setting should not start."""
    return any(finding.level == "error" for finding in findings)


def render_findings(findings: Sequence[Finding]) -> str:
    """Findings as text, the worst first."""
    lines = []
    for finding in sorted(findings, key=lambda one: LEVELS.index(one.level)):
        lines.append(f"{finding.level:<7}  {finding.check}: {finding.message}")
        if finding.remedy:
            lines.append(f"         -> {finding.remedy}")
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    lines.append(f"{counts['error']} errors, {counts['warning']} warnings, {counts['ok']} checks passed")
    return "\n".join(lines)
