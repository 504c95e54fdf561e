"""Length-sorted pools, token-budget groups and load balance for Megatron-Energon training pipelines."""

from aiak_ext.energon_version import check_energon_version

check_energon_version()  # before anything is imported that only newer versions have

from aiak_ext.args import add_extension_args, apply_to_megatron_args  # noqa: E402
from aiak_ext.config import DataBalanceConfig, ExtensionConfig, LengthSortConfig, ODBConfig  # noqa: E402
from aiak_ext.levers import levers_off  # noqa: E402
from aiak_ext.loader import LengthAwareDataLoader, TrainLoader, build_train_loader, get_savable_loader  # noqa: E402
from aiak_ext.task_encoder import LengthAwareTaskEncoderMixin, register  # noqa: E402
from length_sort import LengthPoolSortDataset, sample_length  # noqa: E402

__all__ = [
    "DataBalanceConfig",
    "ExtensionConfig",
    "LengthAwareDataLoader",
    "LengthAwareTaskEncoderMixin",
    "LengthPoolSortDataset",
    "LengthSortConfig",
    "ODBConfig",
    "TrainLoader",
    "add_extension_args",
    "apply_to_megatron_args",
    "build_train_loader",
    "get_savable_loader",
    "levers_off",
    "register",
    "sample_length",
]
