"""Spread the vision and language work of a training step evenly over data-parallel ranks."""

from data_balance.balance import DataBalance
from data_balance.bounds import imbalance, lower_bound
from data_balance.codec import BatchCodec, SampleSize, codec_for, register_codec
from data_balance.cost import CostModel, SampleCostModel
from data_balance.default_codec import DefaultCodec
from data_balance.exchange import exchange
from data_balance.groups import ExchangeError
from data_balance.iterator import BalancedDataIterator, balance_data_iterator
from data_balance.metrics import BalanceMetrics
from data_balance.options import BalanceOptions, ModelConfig
from data_balance.placement import place_bins
from data_balance.plan import BalancePlan
from data_balance.planners import (
    SORTING_ALGORITHMS,
    karmarkar_karp,
    lpt,
    min_move,
    post_global_balancing_greedy_without_pad,
)
from data_balance.prefetch import PrefetchMicroBatchIterator
from data_balance.state import loader_state
from data_balance.vision import BalancedVisionEncoder, keep_in_graph

__all__ = [
    "SORTING_ALGORITHMS",
    "BalanceMetrics",
    "BalanceOptions",
    "BalancePlan",
    "BalancedDataIterator",
    "BalancedVisionEncoder",
    "BatchCodec",
    "CostModel",
    "DataBalance",
    "DefaultCodec",
    "ExchangeError",
    "ModelConfig",
    "PrefetchMicroBatchIterator",
    "SampleCostModel",
    "SampleSize",
    "balance_data_iterator",
    "codec_for",
    "exchange",
    "imbalance",
    "karmarkar_karp",
    "keep_in_graph",
    "loader_state",
    "lower_bound",
    "lpt",
    "min_move",
    "place_bins",
    "post_global_balancing_greedy_without_pad",
    "register_codec",
]
