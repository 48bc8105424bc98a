"""Checks an environment of the user's own, and says what is wrong with it: one line a fault."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist.envs import gymnasium, gymnax
from jaxrl_dist.envs import worker as env_worker
from jaxrl_dist.envs.source import locate
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.spaces import Box, Discrete, Space
from jaxrl_dist.types import PyTree

STEPS = 1000
"""That are played; fewer of an environment that takes longer than ``SECONDS`` for them."""
SECONDS = 10.0
RETURNS = "(observation, reward, terminated, truncated, info)"
SEEDS = 0, 1


class Findings(NamedTuple):
    """What a check has found."""

    faults: list[str]
    notes: list[str]
    """What is no fault, and may not be meant."""
    steps: int
    episodes: int


def check(env: str, options: Mapping[str, str] = {}, timeout: float = 120.0) -> Findings:
    """Plays a Gymnasium or gymnax-style environment at random, and looks at all that it gives back.

    Args:
      env: its name, as for ``envs.find``.
      options: ``--env-options``.
      timeout: seconds in which each of its calls must come back.

    Raises:
      ConfigError: there is no environment of that name and with these options, or it is one of EnvPool's.
    """
    backend, name, _ = locate(env)
    if backend == "envpool":
        raise ConfigError(f"envpool:{name} is EnvPool's own; check-env is for Gymnasium and gymnax-style environments")
    found = _Check()
    refused: list[ConfigError] = []

    def play() -> None:
        if backend == "gymnax":
            _check_gymnax(found, gymnax.native(name, options), name)
            return
        with found.during("importing its module"):
            keywords = gymnasium.options(name, options)

        def make() -> Any:
            return found.call("its constructor", env_worker.construct, name, keywords)

        made = make()
        single = made[0] if isinstance(made, tuple) and len(made) == 2 else made
        if hasattr(single, "reset_env") or hasattr(single, "step_env"):
            _check_gymnax(found, made, name)
        else:
            _check_gymnasium(found, made, make, name)

    def run() -> None:
        try:
            play()
        except _Stop:
            pass
        except ConfigError as error:
            refused.append(error)

    # In a thread, because the user's code may hang.
    thread = threading.Thread(target=run, name=f"check {name}", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.02)
        if time.monotonic() - found.since > timeout:
            found.fault("time", f"{found.doing} has not come back within {timeout:g} s")
            break
    if refused:
        raise refused[0]
    return Findings(list(found.faults.values()), list(found.notes), found.steps, found.episodes)


class _Stop(Exception):
    """Nothing more can be found out."""


class _Check:
    """What is found, and what is being called."""

    def __init__(self) -> None:
        self.faults: dict[str, str] = {}
        self.notes: list[str] = []
        self.steps = self.episodes = 0
        self.doing, self.since = "", time.monotonic()

    def fault(self, kind: str, text: str) -> None:
        """Notes a fault; of one kind, only the first."""
        self.faults.setdefault(kind, " ".join(text.split())[:400])

    def stop(self, kind: str, text: str) -> _Stop:
        """The same, to be raised."""
        self.fault(kind, text)
        return _Stop()

    @contextlib.contextmanager
    def during(self, doing: str) -> Iterator[None]:
        """Makes a fault of whatever is raised within, and an end of the check."""
        self.doing, self.since = doing, time.monotonic()
        try:
            yield
        except ConfigError:
            raise
        except BaseException as error:  # SystemExit too
            line = str(error).strip().split("\n")[0]
            raise self.stop(doing, f"{doing} raises {type(error).__name__}{': ' if line else ''}{line}") from None

    def call(self, doing: str, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Calls the environment."""
        with self.during(doing):
            return function(*args, **keywords)

    # --- What both kinds give back ----------------------------------------------------------------------

    def observation(self, where: str, obs: Any, space: Any) -> None:
        """Looks at an observation: that it is of its space, which has ``shape`` and ``dtype``."""
        x, what = np.asarray(obs), f"the observation of {where}"
        if x.dtype == object or x.dtype.kind in "US":
            self.fault("observation", f"{what} is a {type(obs).__name__}, not an array of numbers")
        elif x.shape != tuple(space.shape):
            self.fault("shape", f"{what} has shape {x.shape}, its space {tuple(space.shape)}")
        elif not np.can_cast(x.dtype, space.dtype):
            self.fault("dtype", f"{what} has dtype {x.dtype}, its space {np.dtype(space.dtype)}")
        elif x.dtype.kind == "f" and not np.isfinite(x).all():
            self.fault("finite", f"{what} is not finite: {_shown(x)}")
        elif outside := _outside(x, space):
            self.fault("range", f"{what} lies outside its space: {outside}")

    def number(self, what: str, x: Any) -> None:
        """Looks at a reward."""
        if not isinstance(x, Real) and not (isinstance(x, np.ndarray | jax.Array) and x.shape == ()):
            shape = f" of shape {x.shape}" if hasattr(x, "shape") else ""
            self.fault("reward", f"{what} is a {type(x).__name__}{shape}, not a number")
        elif not np.isfinite(float(x)):
            self.fault("finite reward", f"{what} is {float(x)}")

    def info(self, where: str, info: Any) -> None:
        """Looks at an info."""
        if not isinstance(info, dict):
            self.fault(f"info {where}", f"{where}'s info is a {type(info).__name__}, not a dict")

    def ends(self, lengths: list[int], both: int) -> None:
        """Looks at how episodes end: ``both`` of them as terminated and truncated at once."""
        self.episodes = len(lengths)
        if not lengths:
            text = f"no episode has ended within {self.steps} steps of random actions; a time limit makes sure of it"
            self.notes.append(text)
        elif both == len(lengths) > 1:
            self.fault("both", "every end is terminated and truncated at once; truncated is for time limits alone")
        if len(lengths) > 4 and lengths[0] > 1 and set(lengths[1:]) == {1}:
            self.fault("restart", "after its first episode each ends with its first step: reset begins no new one")


def _shown(x: Any) -> str:
    return " ".join(str(x).split())[:80]


def _outside(x: np.ndarray, space: Any) -> str:
    """Where an observation lies outside a space of Gymnasium's or gymnax's; nothing if it does not."""
    if hasattr(space, "low"):
        low, high = (np.broadcast_to(np.asarray(bound), x.shape) for bound in (space.low, space.high))
        bad = (x < low) | (x > high)
        if not bad.any():
            return ""
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        return f"{x[place]} at {list(place)} is not between {low[place]} and {high[place]}"
    if hasattr(space, "nvec"):
        low, high = np.asarray(space.start), np.asarray(space.start) + space.nvec - 1
    elif type(space).__name__ == "MultiBinary":
        low, high = np.zeros(x.shape, int), np.ones(x.shape, int)
    else:
        low = np.asarray(getattr(space, "start", 0))
        high = low + int(space.n) - 1
    bad = (x < low) | (x > high)
    return f"{_shown(x)} is not between {_shown(low)} and {_shown(high)}" if bad.any() else ""


# --- Gymnasium ----------------------------------------------------------------------------------------


class _Step(NamedTuple):
    obs: Any
    reward: float
    ended: bool


def _check_gymnasium(check: _Check, env: Any, make: Callable[[], Any], name: str) -> None:
    import gymnasium as library

    if not isinstance(env, library.Env):
        kind = type(env).__name__
        raise check.stop("kind", f"is a {kind}, neither a gymnasium.Env nor a gymnax-style environment")
    for what in ("observation", "action"):
        space = check.call(f"its {what}_space", getattr, env, f"{what}_space", None)
        if not isinstance(space, library.spaces.Space):
            missing = "is missing" if space is None else f"is a {type(space).__name__}, not a space of Gymnasium's"
            check.fault(what, f"its {what}_space {missing}")
            continue
        try:
            found = gymnasium.space_of(space, name, f"{what}s")
        except ConfigError as error:
            check.fault(what, str(error))
            continue
        if what == "action" and isinstance(found, Box) and not np.issubdtype(found.dtype, np.floating):
            check.fault(what, f"its action_space is a Box of {found.dtype}; a Box of floats works")
    if check.faults:
        raise _Stop

    player = _Player(check, env)
    played = player.play(SEEDS[0], STEPS)
    check.steps = len(played) - 1
    check.ends(player.lengths, player.both)
    begun = player.reset(SEEDS[0])
    twin = _Player(check, make())
    again = twin.play(SEEDS[0], min(len(played) - 1, 200))
    if not _same(played[0].obs, again[0].obs):
        check.fault("seed", "two environments with the same seed begin differently: reset ignores its seed")
    elif not _same(played[0].obs, begun):
        text = "reset with the seed of before begins differently after some episodes: it keeps something of them"
        check.fault("fresh", text)
    elif not all(_same(x, y) for x, y in zip(played, again, strict=False)):
        text = "the same seed and actions lead elsewhere the second time: its steps are random, and not by the seed"
        check.fault("deterministic", text)
    else:
        other = twin.play(SEEDS[1], len(again) - 1)
        differ = any(not _same(x, player.firsts[0]) for x in player.firsts)
        if differ and all(_same(x, y) for x, y in zip(again, other, strict=False)):
            text = "every seed gives the same episodes, which differ from each other: reset ignores its seed"
            check.fault("seed", text)
    for each in (player, twin):
        check.call("close", each.env.close)


def _same(x: PyTree, y: PyTree) -> bool:
    """Whether two trees of numbers are equal, bit for bit; NaN is NaN."""
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    return all(np.shape(a) == np.shape(b) and np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


class _Player:
    """Plays an environment of Gymnasium's at random, always by the same actions."""

    def __init__(self, check: _Check, env: Any) -> None:
        self.env = env
        self.firsts: list[Any] = []  # the first observation of each episode
        self.lengths: list[int] = []
        self.both = 0
        self._check = check
        self._last: tuple[Any, bytes, str] | None = None

    def play(self, seed: int, steps: int) -> list[_Step]:
        """The first observation of an episode, and all that follows; ends are followed by a reset."""
        actions = copy.deepcopy(self.env.action_space)
        actions.seed(0)
        began = time.monotonic()
        played = [_Step(self.reset(seed), 0.0, False)]
        self.firsts.append(played[0].obs)
        length = 0
        for _ in range(steps):
            step = self._step(actions.sample())
            length += 1
            played.append(step)
            if step.ended:
                self.lengths.append(length)
                length = 0
                self.firsts.append(self.reset(None))
            if time.monotonic() - began > SECONDS:
                break
        return played

    def reset(self, seed: int | None) -> Any:
        """The first observation of a new episode."""
        check = self._check
        keywords = {} if seed is None else {"seed": seed}
        out = check.call(f"reset({'' if seed is None else f'seed={seed}'})", self.env.reset, **keywords)
        if not (isinstance(out, tuple) and len(out) == 2):
            raise check.stop("reset", f"reset returns a {type(out).__name__}, not (observation, info)")
        check.info("reset", out[1])
        return self._seen("reset", out[0])

    def _step(self, action: Any) -> _Step:
        check = self._check
        given = copy.deepcopy(action)
        out = check.call("step", self.env.step, action)
        if not _same(action, given):
            check.fault("action", "step writes into the action that it is given")
        if not isinstance(out, tuple) or len(out) != 5:
            count = f"{len(out)} values" if isinstance(out, tuple) else f"a {type(out).__name__}"
            old = ", as Gym did before 0.26" if isinstance(out, tuple) and len(out) == 4 else ""
            raise check.stop("step", f"step returns {count}{old}, not {RETURNS}")
        obs, reward, terminated, truncated, info = out
        check.number("the reward", reward)
        for what, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, bool | np.bool_):
                check.fault(what, f"{what} is a {type(flag).__name__}, not a bool")
        check.info("step", info)
        self.both += bool(np.all(terminated)) and bool(np.all(truncated))
        number = float(np.asarray(reward, float).sum()) if "reward" not in check.faults else 0.0
        return _Step(self._seen("step", obs), number, bool(np.any(terminated)) or bool(np.any(truncated)))

    def _seen(self, where: str, obs: Any) -> Any:
        """A copy of an observation, after a look at it and at whether the one before is still what it was."""
        check = self._check
        if self._last is not None:
            before, content, whose = self._last
            if before.tobytes() != content:
                check.fault("alias", f"the observation of {whose} changes with the next call: return a copy of it")
        self._last = (obs, obs.tobytes(), where) if isinstance(obs, np.ndarray) and obs.dtype != object else None
        check.observation(where, obs, self.env.observation_space)
        return copy.deepcopy(obs)


# --- gymnax -------------------------------------------------------------------------------------------


def _check_gymnax(check: _Check, made: Any, name: str) -> None:
    env, params = made if isinstance(made, tuple) else (made, None)
    for method in ("reset_env", "step_env", "is_truncated", "observation_space", "action_space"):
        if not callable(getattr(env, method, None)):
            check.fault(method, f"it has no method {method}")
    if params is None and not hasattr(type(env), "default_params") and not hasattr(env, "default_params"):
        check.fault("params", "it has no default_params, and comes without parameters")
    if check.faults:
        raise _Stop
    params = check.call("default_params", lambda: env.default_params) if params is None else params
    spaces: dict[str, Space] = {}
    natives: dict[str, Any] = {}
    for what in ("observation", "action"):
        natives[what] = check.call(f"{what}_space", getattr(env, f"{what}_space"), params)
        try:
            spaces[what] = gymnax.space_of(natives[what], name, f"{what}s", None)
        except ConfigError as error:
            check.fault(what, str(error))
    if check.faults:
        raise _Stop
    key = jax.random.key(0)
    first = _twice(check, env, "reset_env", lambda key: env.reset_env(key, params), key)
    if not (isinstance(first, tuple) and len(first) == 2):
        raise check.stop("reset", f"reset_env returns a {type(first).__name__}, not (observation, state)")
    obs, state = first
    check.observation("reset_env", obs, natives["observation"])
    for path, leaf in jax.tree.leaves_with_path(state):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float):
            where = jax.tree_util.keystr(path)
            check.fault("leaf", f"its state holds a {type(leaf).__name__} at {where}, which is no array")
    if check.faults:
        raise _Stop
    action = _an_action(spaces["action"], key)
    out = _twice(check, env, "step_env", lambda *args: env.step_env(*args, params), key, state, action)
    if not isinstance(out, tuple) or len(out) != 5:
        count = f"{len(out)} values" if isinstance(out, tuple) else f"a {type(out).__name__}"
        raise check.stop("step", f"step_env returns {count}, not (observation, state, reward, terminated, info)")
    next_obs, next_state, reward, terminated, info = out
    truncated = _twice(check, env, "is_truncated", lambda state: env.is_truncated(state, params), next_state)
    check.observation("step_env", next_obs, natives["observation"])
    check.number("the reward", reward)
    for what, flag in (("terminated", terminated), ("what is_truncated returns", truncated)):
        if np.shape(flag) != () or np.asarray(flag).dtype != bool:
            shape, dtype = np.shape(flag), np.asarray(flag).dtype
            check.fault(what, f"{what} has shape {shape} and dtype {dtype}, and is no single bool")
    check.info("step_env", info)
    _compare(check, "the observation", obs, next_obs)
    _compare(check, "the state", state, next_state)
    if not check.faults:
        _roll(check, env, params, name, natives["observation"])


def _twice(check: _Check, env: Any, what: str, function: Callable[..., Any], *args: Any) -> Any:
    """What a method gives in Python; it must give the same again, and the same once more when compiled."""
    result = check.call(what, function, *args)
    again = check.call(what, function, *args)
    compiled = check.call(f"{what} under jax.jit", jax.jit(lambda *args: _arrays(function(*args))), *args)
    for holder in vars(env).values() if hasattr(env, "__dict__") else ():
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(holder)):
            text = f"{what} keeps a traced value in the environment itself; all that changes belongs into the state"
            raise check.stop("tracer", text)
    for other, when in ((again, "the second time"), (compiled, "under jax.jit")):
        ours, theirs = jax.tree.leaves(_arrays(result)), jax.tree.leaves(_arrays(other))
        if len(ours) != len(theirs) or not all(map(_close, ours, theirs)):
            text = f"{what} gives something else {when} for the same arguments; randomness comes from the key alone"
            raise check.stop("pure", text)
    return result


def _arrays(tree: PyTree) -> PyTree:
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float)]


def _close(x: Any, y: Any) -> bool:
    x, y = (np.asarray(jax.random.key_data(z) if _is_key(z) else z) for z in (x, y))
    if x.shape != y.shape:
        return False
    return np.allclose(x, y, rtol=1e-3, atol=1e-4, equal_nan=True) if x.dtype.kind in "fc" else np.array_equal(x, y)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _compare(check: _Check, what: str, first: PyTree, later: PyTree) -> None:
    """Looks at whether a step keeps structure, shapes and dtypes, as a compiled loop needs."""
    before, after = (str(jax.tree.structure(tree)) for tree in (first, later))
    if before != after:
        check.fault("structure", f"{what} of step_env is {_shown(after)}, that of reset_env {_shown(before)}")
        return
    for (path, a), b in zip(jax.tree.leaves_with_path(first), jax.tree.leaves(later), strict=True):
        where = jax.tree_util.keystr(path)
        at = f" at {where}" if where else ""
        for kind, x, y in (("shape", np.shape(a), np.shape(b)), ("dtype", jnp.result_type(a), jnp.result_type(b))):
            if x != y:
                check.fault(f"{what} {kind}", f"{what}{at} has {kind} {y} after step_env and {x} after reset_env")


def _an_action(space: Space, key: jax.Array) -> jax.Array:
    """One at random; of a component without bounds, some number within 1000 of 0."""
    if isinstance(space, Box):
        low, high = (np.clip(bound, -1e3, 1e3) for bound in (space.low, space.high))
        return jax.random.uniform(key, space.shape, jnp.float32, low, high).astype(space.dtype)
    assert isinstance(space, Discrete)
    return jax.random.randint(key, (), 0, space.n)


def _roll(check: _Check, env: Any, params: Any, name: str, native: Any, num_envs: int = 4) -> None:
    """Plays a few environments in a compiled loop, as training does."""

    pure = check.call("reset_env under jax.vmap", gymnax.from_gymnax, env, params, name, "other")

    def run(key: jax.Array) -> Any:
        def step(state: PyTree, key: jax.Array) -> tuple[PyTree, Any]:
            keys = jax.random.split(key, num_envs)
            action = jax.vmap(lambda key: _an_action(pure.spec.action, key))(keys)
            state, timestep, _ = pure.step(state, action, keys)
            over = jax.vmap(lambda each: env.is_truncated(each, params))(state.env)
            return state, (timestep, timestep.terminated & over, state.episode_length)

        state, _ = pure.reset(jax.random.split(key, num_envs))
        return jax.lax.scan(step, state, jax.random.split(key, STEPS // num_envs))[1]

    steps, both, lengths = check.call(
        "a compiled loop of steps", lambda: jax.device_get(jax.jit(run)(jax.random.key(1)))
    )
    check.steps = int(steps.valid.sum())
    for t, index in itertools.product(range(len(steps.obs)), range(num_envs)):
        check.observation("step_env", steps.obs[t, index], native)
    if not np.isfinite(steps.reward).all():
        check.number("the reward", float(steps.reward[~np.isfinite(steps.reward)][0]))
    ended = steps.terminated | steps.truncated
    check.ends([int(length) for length in lengths[ended]], int(both.sum()))
