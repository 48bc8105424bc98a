"""The ways to execute an algorithm."""

from __future__ import annotations

from jaxrl_dist.plans import asynchronous, gradients, on_device, synchronous
from jaxrl_dist.plans.job import Plan

THREADED_PLANS = ("asynchronous", "gradients")
"""Plans whose actors run in threads."""
PLANS: dict[str, Plan] = {
    "on_device": on_device.on_device,
    "synchronous": synchronous.synchronous,
    "asynchronous": asynchronous.asynchronous,
    "gradients": gradients.gradients,
}
