"""Eight CPU devices for every test, no silent broadcasting between ranks, and equal programs compiled once."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile

import jax

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so would ours
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Set by the first process, inherited by pytest's workers and by the programs that tests start.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    folder = tempfile.mkdtemp(prefix="jaxrl-dist-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
