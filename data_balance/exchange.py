"""Send records (dicts of tensors and small objects) to the ranks that train them: one all-to-all per dtype."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from data_balance.groups import ExchangeError, group_device

Record = dict[str, Any]

#: Every dtype has a fixed place, so that ranks agree on the order of the all-to-alls without asking. All of them travel
#: as bytes: exact for every dtype, and backends need not know any but uint8.
DTYPES: tuple[torch.dtype, ...] = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
_DTYPE_INDEX = {dtype: i for i, dtype in enumerate(DTYPES)}


@dataclass(frozen=True)
class _TensorSpec:
    """Stands for a tensor in a header."""

    dtype_index: int
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * DTYPES[self.dtype_index].itemsize


def exchange(
    outgoing: Sequence[Sequence[Record]], group: dist.ProcessGroup, *, expected: Sequence[int] | None = None
) -> list[list[Record]]:
    """Send ``outgoing[d]`` to rank d of `group`; returns what arrived, by source rank.

    Tensors may be of any layout, shape and dtype of `DTYPES` and arrive bit-identical, on the group's device (host
    memory under Gloo). Everything else in a record travels pickled. What a rank sends to itself is handed over as it
    is. Sizes are compared on all ranks before payload moves: a disagreement raises everywhere and nobody hangs.

    Args:
        outgoing: records per destination, of the group's size.
        group: every member calls with it.
        expected: number of records [group size] that the plan says will arrive from each rank.

    Raises:
        ValueError: a tensor whose dtype or layout cannot be sent.
        ExchangeError: sender and receiver disagree on sizes.
    """
    rank = dist.get_rank(group)
    device = group_device(group)
    headers, payloads = [], []
    for destination, records in enumerate(outgoing):
        header, payload = _pack(records if destination != rank else [])
        headers.append(header)
        payloads.append(payload)
    sizes = [[len(h), *(sum(t.numel() for t in tensors) for tensors in p)] for h, p in zip(headers, payloads)]
    sent = torch.tensor(sizes, dtype=torch.int64, device=device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    arriving = received.tolist()

    packed_headers = torch.frombuffer(bytearray(b"".join(headers)) or bytearray(1), dtype=torch.uint8)
    header_bytes = _all_to_all_bytes(
        packed_headers[: sum(map(len, headers))].to(device), [s[0] for s in sizes], [a[0] for a in arriving], group
    )
    specs = [pickle.loads(part.cpu().numpy().tobytes()) if len(part) else [] for part in header_bytes]
    complaint = _find_disagreement(specs, arriving, expected, rank)
    buffers: dict[int, list[torch.Tensor]] = {}
    for i in _agree_on_dtypes(complaint, sizes, group, device):
        flat = [tensor.to(device) for payload in payloads for tensor in payload[i]]
        send = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=device)
        buffers[i] = _all_to_all_bytes(send, [s[1 + i] for s in sizes], [a[1 + i] for a in arriving], group)
    result = [
        _unpack(spec, {i: parts[source] for i, parts in buffers.items()}, device) for source, spec in enumerate(specs)
    ]
    result[rank] = list(outgoing[rank])
    return result


def _pack(records: Sequence[Record]) -> tuple[bytes, list[list[torch.Tensor]]]:
    """Header, and flat byte tensors per dtype; both in record and field order."""
    payload: list[list[torch.Tensor]] = [[] for _ in DTYPES]
    header = []
    for record in records:
        fields = {}
        for name, value in record.items():
            if isinstance(value, torch.Tensor):
                fields[name] = _TensorSpec(_checked_dtype_index(name, value), tuple(value.shape))
                payload[fields[name].dtype_index].append(value.detach().reshape(-1).contiguous().view(torch.uint8))
            else:
                fields[name] = value
        header.append(fields)
    return (pickle.dumps(header) if header else b""), payload


def _checked_dtype_index(name: str, tensor: torch.Tensor) -> int:
    if tensor.dtype not in _DTYPE_INDEX or tensor.layout != torch.strided:
        raise ValueError(
            f"field {name!r} is a {tensor.layout} tensor of {tensor.dtype}, which cannot be sent to another rank; "
            "convert it in encode_batch, or register a BatchCodec that does"
        )
    return _DTYPE_INDEX[tensor.dtype]


def _all_to_all_bytes(
    send: torch.Tensor, send_sizes: list[int], receive_sizes: list[int], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Parts by source rank."""
    received = torch.empty(sum(receive_sizes), dtype=torch.uint8, device=send.device)
    dist.all_to_all_single(received, send, receive_sizes, send_sizes, group=group)
    return list(received.split(receive_sizes))


def _find_disagreement(
    specs: list[list[Record]], arriving: list[list[int]], expected: Sequence[int] | None, rank: int
) -> str:
    """What is wrong with what the peers announce, or an empty string."""
    for source, records in enumerate(specs):
        if source == rank:
            continue
        if expected is not None and len(records) != expected[source]:
            return f"rank {source} of the group sends {len(records)} records where the plan has {expected[source]}"
        described = [0] * len(DTYPES)
        for record in records:
            for value in record.values():
                if isinstance(value, _TensorSpec):
                    described[value.dtype_index] += value.num_bytes
        if described != arriving[source][1:]:
            return f"rank {source} of the group describes {described} bytes per dtype and sends {arriving[source][1:]}"
    return ""


def _agree_on_dtypes(
    complaint: str, sizes: list[list[int]], group: dist.ProcessGroup, device: torch.device
) -> list[int]:
    """Dtypes that any rank sends, for every rank takes part in those; raises everywhere if any rank complains."""
    columns = torch.tensor(sizes, dtype=torch.int64, device=device).sum(dim=0)
    columns[0] = int(bool(complaint))  # the header's column is free by now
    dist.all_reduce(columns, group=group)
    num_complaints, *num_bytes = columns.tolist()
    if num_complaints:
        raise ExchangeError(
            f"ranks disagree on what is exchanged ({complaint or 'a peer says so'}); they run different plans, so "
            "check that all have the same settings, versions and data"
        )
    return [i for i, count in enumerate(num_bytes) if count]


def _unpack(header: list[Record], buffers: dict[int, torch.Tensor], device: torch.device) -> list[Record]:
    """Records with their tensors cut out of one source's buffers.

    A tensor is copied out: a buffer cut at odd places cannot be viewed as a wider dtype, and a kept slice would
    keep the whole buffer alive.
    """
    position = dict.fromkeys(buffers, 0)
    records = []
    for fields in header:
        record = {}
        for name, value in fields.items():
            if isinstance(value, _TensorSpec):
                index, num_bytes = value.dtype_index, value.num_bytes
                if num_bytes:
                    start = position[index]
                    part = buffers[index][start : start + num_bytes].clone()
                    position[index] = start + num_bytes
                    value = part.view(DTYPES[index]).reshape(value.shape)
                else:
                    value = torch.empty(value.shape, dtype=DTYPES[index], device=device)
            record[name] = value
        records.append(record)
    return records
