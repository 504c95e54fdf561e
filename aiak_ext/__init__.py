"""Length-sorted pools, token-budget groups and load balance for Megatron-Energon training pipelines."""

from aiak_ext.energon_version import check_energon_version

check_energon_version()  # before anything is imported that only newer versions have

from aiak_ext.args import add_extension_args, apply_to_megatron_args  # noqa: E402
from aiak_ext.balance import (  # noqa: E402
    BalancedTrainLoader,
    balance_options,
    balance_train_loader,
    balance_vision_encoder,
)
from aiak_ext.config import DataBalanceConfig, ExtensionConfig, LengthSortConfig, ODBConfig  # noqa: E402
from aiak_ext.levers import levers_off  # noqa: E402
from aiak_ext.loader import LengthAwareDataLoader, TrainLoader, build_train_loader, get_savable_loader  # noqa: E402
from aiak_ext.sample_cost import sample_cost_fn  # noqa: E402
from aiak_ext.sample_quota import SampleQuota  # noqa: E402
from aiak_ext.task_encoder import LengthAwareTaskEncoderMixin, register  # noqa: E402
from aiak_ext.worker_counters import read_counters  # noqa: E402
from data_balance import (  # noqa: E402
    BalancedDataIterator,
    CostModel,
    DataBalance,
    PrefetchMicroBatchIterator,
    SampleCostModel,
)
from data_balance.vision import BalancedVisionEncoder  # noqa: E402
from length_sort import (  # noqa: E402
    GroupInfo,
    LengthPoolSortDataset,
    ODBGroupDataset,
    ODBSyncError,
    SampleGroup,
    loss_scale,
    sample_length,
)

__all__ = [
    "BalancedDataIterator",
    "BalancedTrainLoader",
    "BalancedVisionEncoder",
    "CostModel",
    "DataBalance",
    "DataBalanceConfig",
    "ExtensionConfig",
    "GroupInfo",
    "LengthAwareDataLoader",
    "LengthAwareTaskEncoderMixin",
    "LengthPoolSortDataset",
    "LengthSortConfig",
    "ODBConfig",
    "ODBGroupDataset",
    "ODBSyncError",
    "PrefetchMicroBatchIterator",
    "SampleCostModel",
    "SampleGroup",
    "SampleQuota",
    "TrainLoader",
    "add_extension_args",
    "apply_to_megatron_args",
    "balance_options",
    "balance_train_loader",
    "balance_vision_encoder",
    "build_train_loader",
    "get_savable_loader",
    "levers_off",
    "loss_scale",
    "read_counters",
    "register",
    "sample_cost_fn",
    "sample_length",
]
