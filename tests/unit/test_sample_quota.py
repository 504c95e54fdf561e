"""SampleQuota: counts what all ranks emitted, and says when that is enough."""

import pytest

from aiak_ext import SampleQuota


def test_counts_to_the_quota_and_survives_a_checkpoint():
    quota = SampleQuota(10)
    for num_samples in (4, 0, 5):
        quota.add(num_samples)
    assert (quota.num_emitted, quota.num_missing, quota.reached) == (9, 1, False)
    resumed = SampleQuota(10)
    resumed.load_state_dict(quota.state_dict())
    resumed.add(3)
    assert (resumed.num_emitted, resumed.num_missing, resumed.reached) == (12, 0, True)


def test_wrong_counts_are_refused():
    with pytest.raises(ValueError, match="quota is 0"):
        SampleQuota(0)
    with pytest.raises(ValueError, match="--odb-sync none"):
        SampleQuota(1).add(-1)
