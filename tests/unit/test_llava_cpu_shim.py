"""The CPU shim: what it answers without CUDA, and that it leaves a machine with CUDA alone."""

from __future__ import annotations

import pytest
import torch

from examples.llava_ov import cpu_shim


@pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is off where CUDA is available")
def test_cuda_requests_land_on_the_cpu() -> None:
    assert cpu_shim.install()
    assert cpu_shim.install(), "a second call reports the shim active and changes nothing"
    cpu = torch.device("cpu")
    tensor = torch.ones(2)
    assert torch.zeros(2, device="cuda").device == cpu
    assert torch.empty(2, device=torch.cuda.current_device()).device == cpu
    assert tensor.cuda() is tensor
    assert tensor.to("cuda:0").device == tensor.to(device="cuda", dtype=torch.float64).device == cpu
    assert tensor.to(torch.int32).dtype == torch.int32
    assert tensor.type() == "torch.cuda.FloatTensor"
    assert tensor.type(torch.float64).dtype == torch.float64
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())


@pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is off where CUDA is available")
def test_random_states_replay_dropout() -> None:
    cpu_shim.install()
    cpu_shim.install_after_import()
    from megatron.core.tensor_parallel import checkpoint

    weight = torch.ones(64, requires_grad=True)
    torch.manual_seed(0)
    kept = checkpoint(lambda x: torch.nn.functional.dropout(x, 0.5), False, weight)
    kept.sum().backward()
    assert torch.equal(weight.grad, kept.detach()), "recomputation drops other elements than the forward did"


def test_off_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu_shim, "_installed", False)
    before = (torch.zeros, torch.Tensor.to, torch.cuda.current_device)
    assert not cpu_shim.install()
    assert (torch.zeros, torch.Tensor.to, torch.cuda.current_device) == before
