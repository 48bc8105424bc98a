"""Eight CPU devices for every test, and no silent broadcasting between ranks."""

from __future__ import annotations

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
