"""Environments that are played elsewhere: programs connect as clients and bring their episodes.

aiohttp is imported when it listens, so that no other environment needs it.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from jaxrl_dist import spaces
from jaxrl_dist.config.envs import REMOTE
from jaxrl_dist.config.train import Train
from jaxrl_dist.envs import episodes, masks
from jaxrl_dist.envs.base import Wrappers, outcome
from jaxrl_dist.envs.checking import checked_action
from jaxrl_dist.envs.env_options import parse_options
from jaxrl_dist.envs.wire.access import Access, check_installed, check_origins, find_token
from jaxrl_dist.envs.wire.spaces import interface_from_json, interface_to_json
from jaxrl_dist.errors import ConfigError, say
from jaxrl_dist.spaces import Box, Interface, Space
from jaxrl_dist.types import EnvSpec, EpisodeStats, PyTree, Timestep

if TYPE_CHECKING:
    from jaxrl_dist.envs.host.clients import Clients, Episode, Move

TOKEN_FILE = "JAXRL_DIST_TOKEN_FILE"
"""Variable that names the file of the token, as of ``access.find_token``: no stored run names it.
Without it, the token is made at random and printed."""
ALLOW = "--env-options allow_origin"
NAP_SECONDS = 0.2
"""Seconds of waiting after which a thread looks for signals."""


class Options(NamedTuple):
    """``--env-options`` of ``remote:HOST:PORT``."""

    spaces: str = ""
    """The spaces of the first client in JSON, with which a run is resumed; empty: wait for it."""
    wait_seconds: float = 1.0
    """How long a step waits for a client while others have answered."""
    log_action: bool = False
    """Whether clients may say which action was taken in place of the policy's."""
    allow_origin: str = ""
    """Origins of the web pages that may connect, separated by commas."""


def check_config(config: Train) -> None:
    """Checks that clients can play for a run.

    Raises:
      ConfigError: they cannot.
    """
    for name in ("processes", "actors_on"):
        if getattr(config, name) is not None:
            raise ConfigError(
                "needs environments in several processes, but clients connect to one; with --env "
                f"{config.env}, remove it",
                name,
            )
    if config.seeds > 1 or config.vary:
        raise ConfigError(
            f"--env {config.env} needs a single run, because members of a population would share "
            "its clients; remove --seeds and --vary"
        )
    for name in ("evaluation_episodes", "evaluation_interval", "video_interval"):
        if getattr(config, name):
            raise ConfigError(
                "needs environments besides those that train, which clients do not bring; play the "
                "trained policy with jaxrl-dist evaluate",
                name,
            )
    if config.action_repeat != 1:
        raise ConfigError("--action-repeat does nothing to clients; let them repeat the action")
    if config.record is not None and _options(config.env_options).log_action:
        raise ConfigError(
            "--record needs the probability of each action, which --env-options log_action=true "
            "leaves unknown; remove one"
        )


def find(
    address: str, texts: Mapping[str, str], timeout: float, wrappers: Wrappers
) -> tuple[EnvSpec, Mapping[str, str]]:
    """Returns the spec of the environments of clients, and their options with the spaces.

    Waits for the first client, if the options do not have the spaces.

    Raises:
      ConfigError: an option is wrong, or the address cannot be used.
      TimeoutError: no client has come in time.
    """
    options = _options(texts)
    if options.spaces:
        try:
            interface = interface_from_json(json.loads(options.spaces))
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
            raise ConfigError(
                "--env-options spaces is not what a run has stored; remove it, and the first "
                "client says it"
            ) from None
    else:
        clients = _listen(address, options)
        say(
            f"waiting {timeout:g} s for the first client (--env-timeout); press Ctrl-C twice to end it"
        )
        with clients.changed:
            _wait(clients, lambda: clients.interface is not None, timeout)
            found = clients.interface
        if found is None:
            _close(address)
            raise TimeoutError(
                f"no client has come to {REMOTE}:{address} within {timeout:g} s (--env-timeout)"
            )
        interface = found
        texts = {**texts, "spaces": json.dumps(interface_to_json(interface))}
    spec = EnvSpec(
        address,
        REMOTE,
        REMOTE,
        max_episode_steps=wrappers.limit(None),
        info_metrics=episodes.parse(wrappers.info_metrics),
        logs_actions=options.log_action,
        **vars(interface),
    )
    return spec, texts


def _options(texts: Mapping[str, str]) -> Options:
    return Options(**parse_options(REMOTE, texts, Options()._asdict()))


def _interface(observation: Space, action: Space) -> Interface:
    """Returns the interface of a client's spaces, if policies support them."""
    for path, part in spaces.leaves({"observation": observation, "action": action}).items():
        wanted = jax.dtypes.canonicalize_dtype(part.dtype)
        if path.startswith("action") and isinstance(part, Box):
            wanted = np.dtype(np.float32)
        if part.dtype != wanted:
            raise ConfigError(f"{path} is {spaces.describe(part)}; send {wanted}")
    return Interface(observation, action, masks.part_of(observation, action))


# --- Ports ----------------------------------------------------------------------------------------

_ports = dict[str, "Clients"]()
"""Those that are open, by address."""
_lock = threading.Lock()


def _listen(address: str, options: Options, interface: Interface | None = None) -> Clients:
    """Returns the clients of an address; listens there, unless it does already."""
    with _lock:
        if (clients := _ports.get(address)) is None:
            check_installed(f"--env {REMOTE}")
            from jaxrl_dist.envs.host.clients import Clients

            origins = tuple(filter(None, options.allow_origin.split(",")))
            try:
                check_origins(origins)
            except ConfigError as error:
                raise ConfigError(f"{ALLOW} {error.text}") from None
            file = os.environ.get(TOKEN_FILE)
            token = _token(address, file)
            access = Access(token, origins, f"{ALLOW}=")
            host, _, port = address.rpartition(":")
            clients = _ports[address] = Clients(host, int(port), access, _interface)
            said = token if file is None else f"in {file}"
            say(f"clients connect to ws://{host}:{clients.port} with the token {said}")
        clients.interface = interface or clients.interface
        clients.logs_actions = options.log_action
        return clients


def _close(address: str) -> None:
    """Closes the port, unless environments use it."""
    with _lock:
        if not _ports[address].used:
            _ports.pop(address).close()


@functools.cache  # the same after a restart of failed environments
def _token(address: str, file: str | None) -> str:
    """Returns the token of an address."""
    try:
        return find_token(file)
    except ConfigError as error:
        raise ConfigError(f"{TOKEN_FILE}: {error.text}") from None


def _wait(clients: Clients, ready: Callable[[], bool], seconds: float) -> bool:
    """Waits for a change, while it holds ``clients.changed``; returns whether it has come."""
    deadline = time.monotonic() + seconds
    while not ready():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        clients.changed.wait(min(left, NAP_SECONDS))
    return True


# --- Environments ---------------------------------------------------------------------------------


class Remote:
    """``num_envs`` environments in which clients play: a ``HostEnv``.

    A new episode takes the place that has been free for longest. A place takes invalid steps while
    it has no episode, or while its client does not answer in time, so that the others continue. For
    the learner, an episode is truncated there at its last observation. If the client answers later,
    a replay memory that holds the actions of clients gets the whole step; others lose it.
    """

    def __init__(
        self,
        spec: EnvSpec,
        num_envs: int,
        texts: Mapping[str, str],
        timeout: float,
        *,
        drawn: bool = False,
    ) -> None:
        """Takes places at the address of the spec, and listens there.

        Args:
          texts: the options that ``find`` has returned.
          timeout: seconds within which any client must play.

        Raises:
          ConfigError: they are to be ``drawn``, or the address cannot be used.
        """
        self.spec = spec
        if drawn:
            self.render(0)
        self.num_envs = num_envs
        self._options = _options(texts)
        self._timeout = timeout
        self._steps = 0
        self._ends = 0
        """Episodes that clients have terminated."""
        self._lost_ends = 0
        """Those of which the last step came too late to be learnt from."""
        self._limit = spec.max_episode_steps or np.inf
        self._episodes: list[Episode | None] = [None] * num_envs
        self._free = list(range(num_envs))
        """Places without an episode, the longest free first."""
        self._clients = _listen(spec.id, self._options, spec.interface)
        self._clear()
        self._clients.open(self)

    def _clear(self) -> None:
        self._obs = spaces.zeros(self.spec.observation, self.num_envs)
        self._sent = spaces.zeros(self.spec.action, self.num_envs)
        """The last action of each place that its client knows."""
        self._acting = np.zeros(self.num_envs, bool)
        """Where the policy has seen the newest observation of an episode, and acts on it."""
        self._counter = episodes.EpisodeCounter(self.num_envs, self.spec.info_metrics)

    # --- Called by ``Clients``, which hold their lock

    @property
    def running(self) -> int:
        return self.num_envs - len(self._free)

    def place(self, episode: Episode) -> bool:
        if not self._free:
            lost = [row for row, x in enumerate(self._episodes) if x is not None and x.link is None]
            if not lost:
                return False
            self._leave(lost[0])
        row = self._free.pop(0)
        self._episodes[row] = episode
        self._acting[row] = False
        self._counter.forget(row)
        return True

    def _leave(self, row: int, *, reset: bool = True) -> None:
        """Frees a place; its client learns with ``reset`` that the episode is over."""
        episode = self._episodes[row]
        assert episode is not None, "the place is taken"
        self._episodes[row] = None
        self._free.append(row)
        if reset:
            self._clients.answer(episode, reset=True)
        else:
            self._clients.end(episode)

    # --- A ``HostEnv``

    def reset(self) -> PyTree:
        with self._clients.changed:
            for row, episode in enumerate(self._episodes):
                if episode is not None and not (episode.fresh and episode.move.step == 0):
                    self._leave(row)
            self._clear()
            self._clients.fill()
            self._wait_for_any()
            self._take({})
        return jax.tree.map(np.copy, self._obs)

    def step(self, action: PyTree) -> tuple[Timestep, EpisodeStats]:
        checked = checked_action(self.spec, action, self._steps)
        self._steps += 1
        with self._clients.changed:
            self._give_up()
            awaited = {
                row: episode
                for row, episode in enumerate(self._episodes)
                if episode is not None and self._acting[row]
            }
            for row, episode in awaited.items():
                self._clients.answer(episode, action=self._native(checked, row))
            rows = np.array(list(awaited), int)
            sent = jax.tree.map(lambda x: np.asarray(x)[rows], action)
            spaces.write_rows(rows, self._sent, sent)

            def answered() -> bool:
                return all(
                    episode.fresh or episode.link is None or self._episodes[row] is not episode
                    for row, episode in awaited.items()
                )

            _wait(self._clients, answered, self._options.wait_seconds)
            self._wait_for_any()
            return self._take(awaited)

    def close(self) -> None:
        self._clients.remove(self)
        _close(self.spec.id)
        with self._clients.changed:
            for row, episode in enumerate(self._episodes):
                if episode is not None:
                    self._leave(row)

    def render(self, index: int) -> np.ndarray:
        raise ConfigError(f"{REMOTE}:{self.spec.id} cannot be drawn; let the client draw its games")

    # --- Steps, which hold the lock

    def _give_up(self) -> None:
        """Frees the places of clients that have not answered in time."""
        latest = time.monotonic() - self._timeout
        for row, episode in enumerate(self._episodes):
            if episode is not None and not episode.fresh and episode.since < latest:
                self._leave(row)
        self._clients.fill()

    def _native(self, action: PyTree, row: int) -> PyTree:
        """Returns the action of a place as its client has it."""
        return jax.tree.map(
            lambda part, x: spaces.native(part, x[row : row + 1])[0], self.spec.action, action
        )

    def _wait_for_any(self) -> None:
        """Waits until an episode has moved.

        Raises:
          TimeoutError: none has in time.
        """

        def moved() -> bool:
            return any(episode is not None and episode.fresh for episode in self._episodes)

        if not _wait(self._clients, moved, self._timeout):
            raise TimeoutError(
                f"{REMOTE}:{self.spec.id}: no client has played in these {self.num_envs} "
                f"environments for {self._timeout:g} s (--env-timeout)"
            )

    def _take(self, awaited: Mapping[int, Episode]) -> tuple[Timestep, EpisodeStats]:
        """Takes the moves of all episodes; the steps of those that were ``awaited`` are valid. Late
        ones are, if the learner takes the action that was sent for the newest one.
        """
        taken = jax.tree.map(np.copy, self._sent) if self.spec.logs_actions else ()
        valid = np.zeros(self.num_envs, bool)
        moves: dict[int, Move] = {}
        self._acting[:] = False
        for row, episode in enumerate(self._episodes):
            if episode is None or not episode.fresh:
                continue
            episode.fresh = False
            self._acting[row] = True
            moves[row] = episode.move
            late = self.spec.logs_actions and episode.move.step > 0
            valid[row] = late or awaited.get(row) is episode
            spaces.write_rows(np.array([row]), self._obs, episode.move.observation)
            if valid[row] and episode.move.action is not None:
                spaces.write_rows(np.array([row]), taken, episode.move.action)
        reward = self._rows(moves, lambda move: move.reward, np.float32(0))
        moved = self._rows(moves, lambda move: move.step > 0)
        terminated = self._rows(moves, lambda move: move.terminated)
        self._count_ends(terminated, valid)
        told = terminated | self._rows(moves, lambda move: move.truncated)
        over = told | (moved & (self._counter.length + 1 >= self._limit))
        info = {
            name: self._rows(moves, partial(_number, name), np.float32(np.nan))
            for name in self.spec.info_metrics
        }
        ended = self._counter.add(reward, moved, over, info)
        for row in np.flatnonzero(over).tolist():
            self._acting[row] = False
            self._leave(row, reset=not told[row])
        self._clients.fill()
        obs = jax.tree.map(np.copy, self._obs)
        valid, terminated, truncated = outcome(~valid, terminated, over)
        reward = np.where(valid, reward, np.float32(0))
        return Timestep(obs, reward, terminated, truncated, valid, taken), ended

    def _count_ends(self, terminated: np.ndarray, valid: np.ndarray) -> None:
        """Warns each time that the ends which are not learnt from have doubled."""
        before = self._lost_ends
        self._ends += int(terminated.sum())
        self._lost_ends += int((terminated & ~valid).sum())
        if self._lost_ends.bit_length() > before.bit_length():
            say(
                f"warning: {self._lost_ends} of {self._ends} terminated episodes ended later than "
                f"wait_seconds ({self._options.wait_seconds:g} s) after their last action, so the "
                "policy does not learn from these ends; raise --env-options wait_seconds"
            )

    def _rows(
        self,
        moves: Mapping[int, Move],
        value: Callable[[Move], float],
        none: np.generic = np.False_,
    ) -> np.ndarray:
        """Returns a value of the move of each place, ``[B]``."""
        values = np.full(self.num_envs, none)
        for row, move in moves.items():
            values[row] = value(move)
        return values


def _number(metric: str, move: Move) -> float:
    return move.info.get(episodes.field(metric), np.nan)
