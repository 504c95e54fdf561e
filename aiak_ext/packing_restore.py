"""Mends a fault of Energon's PackingDataset: with ``postencode_sample`` it cannot restore a pack from its key."""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

from megatron.energon.flavors.base_dataset import add_sample_restore_key, set_sample_restore_key
from megatron.energon.wrappers import PackingDataset

from length_sort.sample_errors import restore_errors


def mend_restore_with_postencode(packer: PackingDataset[Any, Any, Any]) -> None:
    """Gives `packer` a ``restore_sample`` that works with a sample encoder; without one it is left alone.

    Energon (7.2 to 7.4.1) takes the prefix of its own key off the inner keys twice and then fails an assertion,
    although ``can_restore_sample()`` promises that restoring works.
    """
    if packer.sample_encoder is not None and not inspect.isgeneratorfunction(packer.final_packer):
        packer.restore_sample = MethodType(_restore_pack, packer)


def _restore_pack(self: PackingDataset[Any, Any, Any], restore_key: Any) -> Any:
    self.assert_can_restore()
    name, pack_index, *sample_keys = restore_key
    assert name == type(self).__name__
    pack = [_restore_encoded(self, sample_key) for sample_key in sample_keys]
    with restore_errors(self.worker_config, pack):
        with self._final_packing_sample_index.ctx(pack_index):
            packed = self.final_packer(pack)
        return set_sample_restore_key(packed, pack_index, *sample_keys, src=self)


def _restore_encoded(self: PackingDataset[Any, Any, Any], restore_key: Any) -> Any:
    name, sample_index, *inner_key = restore_key
    assert name == type(self).__name__
    sample = self.dataset.restore_sample(tuple(inner_key))
    with restore_errors(self.worker_config, sample):
        with self._sample_encoder_sample_index.ctx(sample_index):
            encoded = self.sample_encoder(sample)
        return add_sample_restore_key(encoded, sample_index, src=self)
