"""Joins the processes of a run through JAX's distributed runtime."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import importlib.util
import ipaddress
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxrl_dist.config.train import Processes
from jaxrl_dist.errors import ConfigError, ProcessError, say
from jaxrl_dist.heavy import jax
from jaxrl_dist.hosts import failing, peers, stdout
from jaxrl_dist.hosts.watch import Watch, end, on_terminate

CLUSTERS = ("slurm", "ompi", "gcetpu", "gketpu")
"""Names of the clusters that are detected without flags, as in ``jax.distributed.initialize``."""
HINTS = {"SLURM_JOB_ID", "OMPI_COMM_WORLD_SIZE", "OMPI_MCA_orte_hnp_uri"}
"""Environment variables that SLURM or Open MPI sets; TPU hosts have the package ``libtpu``
instead."""
JOIN_SECONDS = 300
"""Seconds within which all processes must join and, at the end, leave."""
QUIET_SECONDS = 5
"""Seconds after which a process says that it waits for the others."""

_alive: list[object] = []
"""What must not be deleted."""
_joining: threading.Thread | None = None


def start(
    launch: Processes, *, detect: bool = False, waiting: Callable[[], None] = lambda: None
) -> None:
    """Joins the processes of a launch; must be called before JAX is used.
    A process that has joined cannot leave.

    Args:
      detect: whether to look for the processes of SLURM,
        Open MPI or a TPU pod if the launch names none.
      waiting: called several times a second while this process waits for the others;
        an error that it raises ends the wait.

    Raises:
      ConfigError: JAX is in use already, or the processes cannot be joined.
      ProcessError: process 0 is lost before all have joined.
    """
    if peers.world() is not None or launch.processes == 1:
        return
    arguments = _arguments(launch, detect=detect)
    if arguments is None and "jax" not in sys.modules:
        return
    # as JAX sets it
    if "jax" not in sys.modules and os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # the runtime logs what the watch says in one line
    if not jax.distributed.is_initialized():
        if arguments is None:
            return
        _initialize(launch, arguments, waiting)
    if jax.process_count() > 1:
        _join(launch)


def _arguments(launch: Processes, *, detect: bool) -> dict[str, Any] | None:
    """Returns the arguments of ``jax.distributed.initialize``; None: this is the only process."""
    limits = {
        "initialization_timeout": 2 * JOIN_SECONDS,  # ``_wait`` gives up earlier, in one line
        # JAX hears of a process twice in this time:
        # half of it may be over when the process falls silent.
        "heartbeat_timeout_seconds": 2 * int(launch.lost_process_timeout) + 15,
        "shutdown_timeout_seconds": JOIN_SECONDS,
    }
    if launch.coordinator is not None:
        where = {
            "coordinator_address": launch.coordinator,
            "cluster_detection_method": "deactivate",
        }
        return {**limits, **where, "num_processes": launch.processes, "process_id": launch.process}
    cluster = detected() if detect else None
    if cluster is None:
        return None
    return {**limits, "cluster_detection_method": cluster}


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def listens_at(coordinator: str) -> str | None:
    """Returns the only address at which process 0 listens; None:
    it listens at all addresses of this machine.

    A host's name, and an address that a router translates,
    do not say where the others' connections arrive.

    Raises:
      ConfigError: the port is in use.
    """
    host, port = _split(coordinator)
    version = 4 if host == "localhost" else 0
    with contextlib.suppress(ValueError):
        version = ipaddress.ip_address(host).version
    family = socket.AF_INET6 if version == 6 else socket.AF_INET
    for name in (host, "") if version else ("",):
        with socket.socket(family) as probe:
            # a run that has ended here leaves no trace
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((name, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:  # gRPC would share the port with the other
                    raise ConfigError(
                        f"--coordinator {coordinator} is in use, by another process 0 or another "
                        "program; name another port"
                    ) from None
            else:
                return coordinator if name else None
    return None


def detected() -> str | None:
    """Returns JAX's name for the cluster that has started this process and others; None:
    no cluster has.

    Raises:
      ConfigError: the cluster does not report what JAX needs.
    """
    if not (HINTS & os.environ.keys() or importlib.util.find_spec("libtpu")):
        return None  # without importing JAX, which takes a second before a wrong flag is refused
    try:
        from jax._src.clusters import ClusterEnv  # JAX has no public name for it
    except ImportError:
        return None
    for kind in ClusterEnv._cluster_types:
        try:
            if kind.name in CLUSTERS and kind.is_env_present():
                if kind.get_process_count() > 1:
                    return kind.name
                return None
        except Exception as error:  # a metadata server may not answer
            line = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"the processes of {kind.name} cannot be found: {line}; train on this one alone "
                "with --processes 1"
            ) from None
    return None


def _initialize(launch: Processes, arguments: dict[str, Any], waiting: Callable[[], None]) -> None:
    """Joins the processes in a thread: C++ waits for the others there, and Python would handle no
    signal meanwhile.
    """
    from jax._src.distributed import global_state  # JAX has no public name for its client

    global _joining
    if launch.coordinator is not None and not launch.process:
        arguments["coordinator_bind_address"] = listens_at(launch.coordinator)
    config: Any = jax.config
    if getattr(config, "jax_cpu_collectives_implementation", None) in (None, "none"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    _alive.append(on_terminate(failing.process_lost))
    errors: list[Exception] = []

    def initialize() -> None:
        try:
            with _hearing_of_losses():
                jax.distributed.initialize(**arguments)
        except Exception as error:
            errors.append(error)

    _joining = threading.Thread(target=initialize, name="join", daemon=True)
    _joining.start()
    try:
        _wait(_joining, global_state, waiting)
        if errors:
            raise _unjoined(_reason(errors[0]))
    except BaseException:
        # else its end at Python's end fails, with a traceback
        global_state.client = None
        raise


@contextlib.contextmanager
def _hearing_of_losses() -> Iterator[None]:
    """Makes the client that JAX makes meanwhile call ``process_lost`` once process 0 is lost.

    jaxlib would abort the others with a page of stack trace, whatever the heartbeats' time-out and
    ``jax_enable_recoverability``; only this option prevents it, and ``initialize`` does not pass it
    on.
    """
    from jax._src import distributed  # JAX has no public name for it

    library: Any = vars(distributed)["_jax"]
    original = library.get_distributed_runtime_client
    library.get_distributed_runtime_client = functools.partial(
        original, missed_heartbeat_callback=failing.process_lost
    )
    try:
        yield
    finally:
        library.get_distributed_runtime_client = original


def _reason(error: Exception) -> str:
    """Returns in one line why JAX has not joined the processes."""
    line = " ".join(str(error).split())[:300]
    if "before any JAX calls" in line:
        return "JAX is already in use; join the processes first, with jax.distributed.initialize"
    if "bad_cast" in line:  # jaxlib cannot hand its reason to ``process_lost``
        return "process 0 has another --processes, or two processes have the same --process"
    return line


def _wait(joining: threading.Thread, state: Any, waiting: Callable[[], None]) -> None:
    """Waits until a thread has joined the processes, and says so once that takes long;
    ``state`` is JAX's.

    Raises:
      ConfigError: not all processes have joined in time.
      ProcessError: process 0 is lost.
    """
    began = time.monotonic()
    said = False
    reached = False
    while joining.is_alive():
        joining.join(0.5)
        waiting()
        if state.client is None:
            continue
        if state.process_id:
            answers = listens(state.coordinator_address)
            if reached and answers is False:
                raise ProcessError("process 0 is lost: it ended before all processes joined")
            reached = reached or answers is True
        others = f"the others of {state.num_processes} processes"
        if state.process_id and not reached:
            others = f"process 0 at {state.coordinator_address}"
        if time.monotonic() - began > JOIN_SECONDS:
            raise _unjoined(f"no answer from {others} within {JOIN_SECONDS} s")
        if time.monotonic() - began > QUIET_SECONDS and not said:
            said = True
            say(f"waiting for {others}, for at most {JOIN_SECONDS} s")


def listens(address: str) -> bool | None:
    """Returns whether a process listens at an address; None: that cannot be known."""
    try:
        socket.create_connection(_split(address), 1.0).close()
    except OSError as error:
        if isinstance(error, ConnectionRefusedError):
            return False
        return None
    return True


def _unjoined(why: str) -> ConfigError:
    return ConfigError(f"the processes of the run cannot be joined: {why}")


def _join(launch: Processes) -> None:
    from jax._src.distributed import global_state  # JAX has no public name for its key-value store

    from jaxrl_dist.hosts import arrays

    number = jax.process_index()
    count = jax.process_count()
    client = global_state.client
    watch = Watch(client, number, count, launch.lost_process_timeout)
    failing.begin(watch)
    watch.gone = lambda: listens(str(global_state.coordinator_address)) is False
    peers.join(peers.World(client, number, count, lambda: watch.problem))
    atexit.register(watch.disconnect)  # then JAX waits for the other processes, and disconnects
    peers.all_gather(None, "the start")
    with stdout.discarded():
        arrays.connect()


def leave(code: int) -> None:
    """As ``failing.leave``; also ends a process that still waits for the others."""
    if _joining is not None and _joining.is_alive():
        end(code)
    failing.leave(code)
