"""Start a module of the example on several processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def launch(module: str, arguments: Sequence[str], *, num_ranks: int, timeout_s: float) -> None:
    """Run `module` on `num_ranks` processes through torchrun and wait for them; none outlives the call.

    Raises:
        RuntimeError: A rank failed or the time ran out; what it printed is on the screen.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",  # ranks and data workers share the cores
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])),
        # Megatron core and torch announce their own deprecations on every start.
        "PYTHONWARNINGS": "ignore::FutureWarning,ignore::UserWarning,ignore::DeprecationWarning",
    }
    # Whoever ends this process ends the ranks with it: an exit runs the `finally` below, a bare signal does not.
    previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    process = subprocess.Popen([*command, "-m", module, *arguments], env=environment)
    try:
        code = process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{module} was not done after {timeout_s:.0f} s and was stopped") from error
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun passes it on to its ranks
            process.wait()
        signal.signal(signal.SIGTERM, previous)
    if code != 0:
        raise RuntimeError(f"{module} failed with exit code {code}; its messages are above")
