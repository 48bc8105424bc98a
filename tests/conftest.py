"""Eight CPU devices for every test, and no silent broadcasting between ranks."""

from __future__ import annotations

import signal

import jax

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so would ours
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
