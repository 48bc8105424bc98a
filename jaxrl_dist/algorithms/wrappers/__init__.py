"""Wrappers: functions from an ``Algorithm`` to an ``Algorithm``, one file each.

They scale and clip observations and rewards, average parameters, and replace goals. What a wrapper
remembers is in front of the algorithm's own ``variables.stats`` and of its core: see ``extended``.
"""

from jaxrl_dist.algorithms.wrappers.averaging import average_parameters as average_parameters
from jaxrl_dist.algorithms.wrappers.clipping import clip_rewards as clip_rewards
from jaxrl_dist.algorithms.wrappers.extending import extended as extended
from jaxrl_dist.algorithms.wrappers.hindsight import hindsight as hindsight
from jaxrl_dist.algorithms.wrappers.normalizing import (
    normalize_observations as normalize_observations,
)
from jaxrl_dist.algorithms.wrappers.scaling import scale_rewards as scale_rewards
from jaxrl_dist.algorithms.wrappers.scaling import scaled_records as scaled_records
from jaxrl_dist.algorithms.wrappers.statistics import RunningStats as RunningStats
