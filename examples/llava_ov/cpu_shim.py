"""Lets megatron-core run on a machine without CUDA (CPU build of torch, gloo). Does nothing where CUDA is available.

Megatron core asks for the current CUDA device, for streams, CUDA random states and CUDA tensor type names even on
paths that work on any device. The shim answers those questions with the CPU. It patches functions, not a
``TorchFunctionMode``: a mode is thread-local and would be missing in background threads.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")
# What makes a tensor and takes ``device=``.
_FACTORIES = (
    torch.arange,
    torch.as_tensor,
    torch.empty,
    torch.empty_like,
    torch.eye,
    torch.full,
    torch.full_like,
    torch.linspace,
    torch.ones,
    torch.ones_like,
    torch.rand,
    torch.rand_like,
    torch.randint,
    torch.randn,
    torch.randn_like,
    torch.randperm,
    torch.tensor,
    torch.zeros,
    torch.zeros_like,
)

_installed = False


class _NoStream:
    """Stands in for ``torch.cuda.Stream`` and ``torch.cuda.Event``: the CPU has one stream, always in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def record_event(self, *args: Any) -> _NoStream:
        return self

    def synchronize(self) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def wait_event(self, *args: Any) -> None: ...

    def wait_stream(self, *args: Any) -> None: ...


def _is_cuda(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"


def _device_to_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with a CUDA ``device=`` argument replaced by the CPU."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return function(*args, **kwargs)

    return wrapper


def _replace(owner: Any, **functions: Any) -> None:
    for name, function in functions.items():
        setattr(owner, name, function)


def _patch_cuda_namespace() -> None:
    _replace(
        torch.cuda,
        Stream=_NoStream,
        Event=_NoStream,
        current_device=lambda: _CPU,
        synchronize=lambda *args, **kwargs: None,
        current_stream=lambda *args, **kwargs: _NoStream(),
        default_stream=lambda *args, **kwargs: _NoStream(),
        stream=lambda stream: contextlib.nullcontext(),
        get_rng_state=lambda *args, **kwargs: torch.get_rng_state(),
        set_rng_state=lambda *args, **kwargs: None,
    )


def _patch_tensor_methods() -> None:
    tensor_to, tensor_type = torch.Tensor.to, torch.Tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = (_CPU, *args[1:])
        return tensor_to(self, *args, **kwargs)

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Gradient clipping and the mixed-precision optimizer compare with names such as "torch.cuda.FloatTensor".
        answer = tensor_type(self, *args, **kwargs)
        return answer if args or kwargs else answer.replace("torch.", "torch.cuda.", 1)

    _replace(
        torch.Tensor,
        to=_device_to_cpu(to),
        type=type_name,
        cuda=lambda self, *args, **kwargs: self,
        record_stream=lambda self, stream: None,
    )


def install() -> bool:
    """Patch torch; call it before ``megatron.core`` is imported. Returns whether the shim is active.

    Calling it again, or on a machine with CUDA, changes nothing.
    """
    global _installed
    if torch.cuda.is_available() or _installed:
        return _installed
    with torch.device("cpu"):
        # Device contexts note at their first use which functions they govern; that must be the original ones, or
        # `with torch.device("meta")` has no effect any more.
        torch.empty(0)
    _patch_cuda_namespace()
    _patch_tensor_methods()
    _replace(torch, **{factory.__name__: _device_to_cpu(factory) for factory in _FACTORIES})
    _installed = True
    return True


def install_after_import() -> None:
    """Patch Megatron's CUDA random-state functions; call it once ``megatron.core`` is imported.

    Activation recomputation saves and restores these states. On the CPU the only generator is torch's default one,
    which Megatron already saves beside them, so reading returns that state and setting does nothing.
    """
    if not _installed:
        return
    from megatron.core.tensor_parallel import random

    _replace(
        random,
        _get_cuda_rng_state=lambda *args, **kwargs: torch.get_rng_state(),
        _set_cuda_rng_state=lambda *args, **kwargs: None,
    )
    _replace(random.CudaRNGStatesTracker, fork=lambda self, name=None: contextlib.nullcontext())
