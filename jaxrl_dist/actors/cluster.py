"""The Ray cluster that runs actors in its processes."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from jaxrl_dist.checks import counted, install_extra
from jaxrl_dist.config.train import Train
from jaxrl_dist.errors import ConfigError, first_line
from jaxrl_dist.hosts.start import listens

ADDRESS = "RAY_ADDRESS"
"""Ray's environment variable that names a cluster."""
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
END_SECONDS = 20.0
"""Seconds for Ray to end its processes."""
HOST_AND_PORT = re.compile("[^/]+:[0-9]+")


_ours = list["_Connection"]()
"""The connection that this module has made; empty: none, or the user's program has connected."""


class Nodes:
    """The nodes of a cluster that are alive."""

    def __init__(self, resources: Sequence[Mapping[str, float]]) -> None:
        """``resources`` are all that a node has, also what is in use."""
        self.resources = resources

    def total(self, resource: str) -> float:
        """Returns how much of a resource all nodes have."""
        return sum(node.get(resource, 0.0) for node in self.resources)

    def places(self, needed: Mapping[str, float]) -> int:
        """Returns how many actors fit that each need these resources."""
        counts = [
            min(int(node.get(name, 0.0) / amount + 1e-9) for name, amount in needed.items())
            for node in self.resources
        ]
        return sum(counts)

    def __str__(self) -> str:
        nodes = counted(len(self.resources), "node")
        gpus = f", {counted(int(self.total('GPU')), 'GPU')}" if self.total("GPU") else ""
        return f"{nodes}, {self.total('CPU'):g} CPUs{gpus}"


def connect(config: Train) -> None:
    """Connects to the cluster that ``RAY_ADDRESS`` names, or starts one on this machine.

    Does nothing if this process is connected already.

    Raises:
      ConfigError: Ray is missing, no cluster answers, or it is too small for the actors.
    """
    ray = _ray()
    if not ray.is_initialized():
        _ours.append(start())
    _check_room(config, find_nodes())
    _send_by_value(ray, config)


def find_nodes() -> Nodes:
    """Returns the nodes of the cluster that this process is connected to."""
    import ray

    return Nodes([node["Resources"] for node in ray.nodes() if node["Alive"]])


def needs(config: Train) -> dict[str, float]:
    """Returns the resources that an actor needs; those that it does not need are left out."""
    needed = {"CPU": config.actor_cpus, "GPU": config.actor_gpus}
    return {name: amount for name, amount in needed.items() if amount}


def _ray() -> ModuleType:
    try:
        import ray
    except ImportError:
        raise ConfigError(f"--actors-on ray needs Ray: {install_extra('ray')}") from None
    return ray


def start() -> _Connection:
    """Connects to the cluster that ``RAY_ADDRESS`` names, or starts one, without Ray's lines on the
    console.

    An address is always given: without one, Ray joins whatever cluster was last started on this
    machine, also another user's.

    Raises:
      ConfigError: no cluster answers.
    """
    ray = _ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get(ADDRESS, "local")
    if HOST_AND_PORT.fullmatch(address) and not listens(address):  # Ray would try for minutes
        raise _no_cluster(address, "nothing answers there")
    connection = _Connection(ray, address)
    if connection.error is not None:
        raise _no_cluster(address, first_line(connection.error))
    return connection


class _Connection:
    """A connection to a cluster, in a thread of its own.

    In the main thread Ray would replace the handler of SIGTERM, and in a thread that ends, Linux
    would end the processes that Ray has started.
    """

    def __init__(self, ray: Any, address: str) -> None:
        self.error: Exception | None = None
        """Why it has failed."""
        self._ray = ray
        self._address = address
        self._tried = threading.Event()
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray", daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray forks
            self._thread.start()
            self._tried.wait()
        _restore_signals()

    def _run(self) -> None:
        try:
            local = {"include_dashboard": False} if self._address == "local" else {}
            self._ray.init(
                self._address, log_to_driver=False, logging_level=logging.CRITICAL, **local
            )
        except Exception as error:  # of many classes
            self.error = error
            return
        finally:
            self._tried.set()
        self._leaving.wait()
        self._ray.shutdown()

    def close(self) -> None:
        """Leaves the cluster."""
        self._leaving.set()
        self._thread.join(END_SECONDS)


def _restore_signals() -> None:
    """Lets Python handle signals: Ray's C++ takes SIGTERM, and aborts 3 s later by SIGALRM."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in SIGNALS:
        signal.signal(number, signal.getsignal(number))
    signal.alarm(0)


def _no_cluster(address: str, why: str) -> ConfigError:
    if address == "local":
        return ConfigError(
            f"--actors-on ray cannot start a cluster on this machine: {why}; start one with `ray "
            f"start --head`, and set {ADDRESS}"
        )
    return ConfigError(
        f"--actors-on ray finds no cluster at {ADDRESS}={address}: {why}; start one with `ray start "
        f"--head`, or unset {ADDRESS}"
    )


def _check_room(config: Train, nodes: Nodes) -> None:
    assert config.num_actors is not None, "the preset has it"
    needed = needs(config)
    if not needed:
        return
    places = nodes.places(needed)
    if config.num_actors > places:
        amounts = " and ".join(f"{amount:g} {name}" for name, amount in needed.items())
        raise ConfigError(
            f"--num-actors {config.num_actors} need {amounts} each, but the Ray cluster "
            f"({nodes}) has room for {places}; use fewer actors, or a lower --actor-cpus"
        )


def _send_by_value(ray: Any, config: Train) -> None:
    """Lets the class of an algorithm in a user's file travel by value: no other process finds the
    file's module by its name.
    """
    for part in (config, *getattr(config.algorithm, "configs", {}).values()):
        module = type(part.algorithm).__module__
        if module.startswith("algorithm_of_"):
            ray.cloudpickle.register_pickle_by_value(sys.modules[module])


@contextlib.contextmanager
def joined(config: Train) -> Iterator[None]:
    """Connects as ``connect`` if the actors of a run need it, and leaves the cluster at the end,
    unless the user's program had connected before; a cluster that this process has started ends.
    """
    if config.actors_on is None:
        yield
        return
    connect(config)
    try:
        yield
    finally:
        while _ours:
            _ours.pop().close()
