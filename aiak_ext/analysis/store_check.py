"""Whether ODB's agreement store works: a host process of its own, and the way to another node."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from aiak_ext.analysis.findings import Finding, error, ok
from length_sort.store_host import StoreHost

_TIMEOUT_S = 10.0
#: A port on which the other node surely answers, if only with a refusal: the answer shows that it is reachable.
_ANY_PORT = 1


def check_store(address: str | None = None) -> list[Finding]:
    """Start a store host here as DP rank 0 does and use it; with an address also see whether that node answers.

    Args:
        address: HOST or HOST:PORT of the node of DP rank 0; a port must accept a connection.
    """
    findings = [_check_own_host()]
    if address is not None:
        findings.append(check_reachable(address))
    return findings


def _check_own_host() -> Finding:
    try:
        host = StoreHost(start_timeout_s=60.0)
    except RuntimeError as problem:
        return error("store", str(problem), "repair torch on this node, or use --odb-sync none with endless streams")
    try:
        store = TCPStore("127.0.0.1", host.port, is_master=False, timeout=timedelta(seconds=_TIMEOUT_S))
        store.set("doctor", "well")
        answer = store.get("doctor")
    except (DistNetworkError, DistStoreError) as problem:
        return error("store", f"the store host started but does not answer ({problem})", "allow local TCP connections")
    finally:
        host.close()
    assert answer == b"well"
    return ok("store", "a store host starts on this node and answers")


def check_reachable(address: str) -> Finding:
    """Whether the node HOST[:PORT] answers from here; a port must accept a connection."""
    name, _, port = address.partition(":")
    try:
        socket.create_connection((name, int(port or _ANY_PORT)), timeout=_TIMEOUT_S).close()
    except ConnectionRefusedError:
        if port:
            return error(
                "store", f"{address} refuses the connection", "start the run's store there, or correct the port"
            )
    except ValueError:
        return error("store", f"{address!r} is no HOST or HOST:PORT", "write e.g. node0:29500")
    except OSError as problem:
        return error(
            "store",
            f"{name} cannot be reached from here ({problem}): data workers could not agree",
            "set MASTER_ADDR to an address that every node can reach, and open its ports to them",
        )
    return ok("store", f"{address} answers")
