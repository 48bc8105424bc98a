"""Joins the processes of a run through JAX's distributed runtime."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Any

from jaxrl_dist.errors import ConfigError
from jaxrl_dist.hosts import peers
from jaxrl_dist.hosts.config import Launch
from jaxrl_dist.hosts.watch import Watch, on_terminate

CLUSTERS = ("slurm", "ompi", "gcetpu", "gketpu")
"""Names of the clusters that are detected without flags, as in ``jax.distributed.initialize``."""
HINTS = {"SLURM_JOB_ID", "OMPI_COMM_WORLD_SIZE", "OMPI_MCA_orte_hnp_uri"}
"""Environment variables, of which SLURM and Open MPI set one; TPU hosts have the package ``libtpu`` instead."""
JOIN_SECONDS = 300
"""Seconds within which all processes must join and, at the end, leave."""
_MORE_SECONDS = 15
"""Seconds after ``lost_process_timeout`` until JAX's heartbeats end the process: the watch names the lost one first."""

_watch: Watch | None = None
_kept: list[Any] = []


def watch() -> Watch | None:
    """Returns the watch of a run over several processes; None: this is the only process."""
    return _watch


def start(launch: Launch, *, detect: bool = False) -> None:
    """Joins the processes of a launch; must be called before JAX is used. A process that has joined cannot leave.

    Args:
      detect: whether to look for the processes of SLURM, Open MPI or a TPU pod if the launch names none.

    Raises:
      ConfigError: JAX is in use already, or the processes cannot be joined.
    """
    if peers.world() is not None or launch.processes == 1:
        return
    arguments = _arguments(launch, detect=detect)
    if arguments is None and "jax" not in sys.modules:
        return
    if "jax" not in sys.modules and os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":  # as JAX sets it
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # the runtime logs what the watch says in one line
    import jax

    if not jax.distributed.is_initialized():
        if arguments is None:
            return
        _initialize(launch, arguments)
    if jax.process_count() > 1:
        _join(launch)


def _arguments(launch: Launch, *, detect: bool) -> dict[str, Any] | None:
    """Returns the arguments of ``jax.distributed.initialize``; None: this is the only process."""
    if launch.coordinator is not None:
        return {
            "coordinator_address": launch.coordinator,
            "num_processes": launch.processes,
            "process_id": launch.process,
            "cluster_detection_method": "deactivate",
        }
    found = detected() if detect else None
    return None if found is None else {"cluster_detection_method": found}


def detected() -> str | None:
    """Returns JAX's name for the cluster that has started this process and others; None: no cluster has.

    Raises:
      ConfigError: the cluster does not report what JAX needs.
    """
    if not (HINTS & os.environ.keys() or importlib.util.find_spec("libtpu")):
        return None  # importing JAX takes a second, and a wrong flag should be refused at once
    try:
        from jax._src.clusters import ClusterEnv  # JAX has no public name for it
    except ImportError:
        return None
    for kind in ClusterEnv._cluster_types:
        if kind.name in CLUSTERS:
            try:
                if kind.is_env_present():
                    return kind.name if kind.get_process_count() > 1 else None
            except Exception as error:  # a metadata server may not answer
                line = " ".join(str(error).split())[:200]
                raise ConfigError(
                    f"the processes of {kind.name} cannot be found: {line}; --processes 1 trains on this one alone"
                ) from None
    return None


def _initialize(launch: Launch, arguments: dict[str, Any]) -> None:
    import jax
    from jax._src import distributed

    config: Any = jax.config
    if getattr(config, "jax_cpu_collectives_implementation", None) in (None, "none"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    _kept.append(on_terminate(_ended))
    library: Any = vars(distributed)["_jax"]
    original = library.get_distributed_runtime_client
    # ``initialize`` does not pass this option on; without it, C++ ends the process with a page of stack trace.
    client = functools.partial(original, missed_heartbeat_callback=_ended)
    library.get_distributed_runtime_client = client
    try:
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=JOIN_SECONDS,
            heartbeat_timeout_seconds=int(launch.lost_process_timeout) + _MORE_SECONDS,
            shutdown_timeout_seconds=JOIN_SECONDS,
        )
    except Exception as error:
        line = " ".join(str(error).split())[:300]
        if "before any JAX calls" in line:
            line = "JAX is in use already; join the processes first, by jax.distributed.initialize"
        raise ConfigError(f"the processes of the run cannot be joined: {line}") from None
    finally:
        library.get_distributed_runtime_client = original


def _ended(*status: object) -> None:
    if _watch is not None:
        _watch.service_ended(*status)
    os._exit(1)


def _join(launch: Launch) -> None:
    import jax
    from jax._src.distributed import global_state

    from jaxrl_dist.hosts import arrays

    global _watch
    here, count, client = jax.process_index(), jax.process_count(), global_state.client
    _watch = found = Watch(client, here, count, launch.lost_process_timeout)
    peers.join(peers.World(client, here, count, launch.lost_process_timeout, lambda: found.problem))
    atexit.register(_part)
    peers.gather(None, "the start")
    with no_stdout():
        arrays.connect()


@contextlib.contextmanager
def no_stdout() -> Iterator[None]:
    """Discards what C++ prints to stdout, where gloo logs each of its connections."""
    sys.stdout.flush()
    kept, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(null)


def _part() -> None:
    """Ends the watch when the process ends; JAX then waits for the other processes and disconnects."""
    if _watch is not None:
        _watch.part()


def leave(code: int) -> None:
    """Ends this process at once if it or another one has failed: there is nothing to wait for.

    Process 0 leaves last: the others hear from it what has happened.
    """
    if _watch is not None and (_watch.failed or _watch.problem is not None):
        _watch.leave(code)


def signalled() -> bool:
    """Returns whether a signal has asked any process to end the run."""
    return _watch is not None and _watch.signal != 0


def failed_alike(error: BaseException) -> bool:
    """Returns whether all processes have failed at the same point, so that they can still save the run together."""
    import jax

    if peers.world() is None:
        return True
    return not isinstance(error, jax.errors.JaxRuntimeError) and peers.fail_alike(str(error))


@contextlib.contextmanager
def failing() -> Iterator[None]:
    """Tells the other processes of an error that ends the run here, so that they end, too. Within, all are needed.

    An error of a collective may come from a process that is lost: the watch then ends this one with a better message.
    """
    watch = _watch
    if watch is None:
        yield
        return
    watch.running += 1
    try:
        yield
    except BaseException as error:
        if not isinstance(error, GeneratorExit):
            _tell(watch, error)
        raise
    finally:
        watch.running -= 1


def _tell(watch: Watch, error: BaseException) -> None:
    import jax

    if watch.problem is not None or watch.failed is not None:
        return
    lines = str(error).strip().splitlines()
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
        problem = watch.wait()
        if problem is not None:
            raise problem from None
    code = 2 if isinstance(error, ConfigError) else getattr(error, "exit_code", 1)
    watch.fail(lines[0] if lines else type(error).__name__, code)
