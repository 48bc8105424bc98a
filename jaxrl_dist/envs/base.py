"""The interface of every environment backend: a vector of environments that reset on the next
step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_dist import mesh
from jaxrl_dist.checks import MAX_SIZE, did_you_mean
from jaxrl_dist.envs.native import PlainSpace, check_counted, env_label, named, plain
from jaxrl_dist.errors import ConfigError, EnvError
from jaxrl_dist.simulator import Simulated, Simulator
from jaxrl_dist.spaces import Box, Discrete, MultiDiscrete, Part, Space, leaves, num_choices
from jaxrl_dist.types import Array, EnvSpec, EpisodeStats, PyTree, Timestep


class DeviceEnv(NamedTuple):
    """Environments as pure functions over a batch of any size, for use in a jitted program."""

    spec: EnvSpec
    reset: Callable[[jax.Array], tuple[PyTree, PyTree]]
    """``(keys [B]) -> (state, obs [B, ...])``."""
    step: Callable[[PyTree, PyTree, jax.Array], tuple[PyTree, Timestep, EpisodeStats]]
    """``(state, action [B, ...], keys [B]) -> (state, step, episodes)``; the statistics have an
    entry per environment, ``[B]``, and their count ``episodes`` is 1 where an episode ended in this
    step."""
    render: Callable[[PyTree], Any] | None = None
    """Draws one native state, ``[H, W, 3]`` uint8; None: it cannot."""
    simulate: Callable[[PyTree], Simulator] | None = None
    """Of the rows' states; None: policies cannot plan in it."""
    # ``(state, action) -> (probability [K], simulated [K])``, and
    # ``() -> (probability [N], state [N], obs [N])``
    outcomes: Callable[[PyTree, PyTree], tuple[jax.Array, Simulated]] | None = None
    """None: a step's are not named."""
    starts: Callable[[], tuple[jax.Array, PyTree, PyTree]] | None = None
    """None: the first states are not named."""


class Wrappers(NamedTuple):
    """Settings of the wrappers between environment and policy, the same for every backend;
    fields as in ``Train``.
    """

    frame_stack: int | None = None
    action_repeat: int = 1
    time_limit: int | None = None
    hide: str | None = None
    policies: Mapping[str, str] = {}
    joint: Sequence[str] = ()
    """Policies whose agents act as one; "" if there is one policy."""
    agent_ids: bool = False
    info_metrics: str | None = None

    def limit(self, raw_steps: int | None) -> int | None:
        """Returns the time limit in env steps;
        ``raw_steps`` is the environment's limit before action repeat.
        """
        if raw_steps is None:
            native = None
        else:
            native = -(-raw_steps // self.action_repeat)
        return min(
            (limit for limit in (native, self.time_limit) if limit is not None), default=None
        )

    def cut(self, truncated: jax.Array, steps: jax.Array) -> jax.Array:
        """Returns ``truncated``, with the episodes that
        ``steps`` env steps bring to the flag's limit.
        """
        if self.time_limit is None:
            return truncated
        return truncated | (steps >= self.time_limit)

    @property
    def own_limit(self) -> int | None:
        """The time limit in raw environment steps, before action repeat."""
        if self.time_limit is None:
            return None
        return self.time_limit * self.action_repeat


UNWRAPPED = Wrappers()


def label_of(spec: EnvSpec) -> str:
    """Returns an environment's name for messages; see ``native.env_label``."""
    return env_label(spec.backend, spec.id)


class EnvSlice(NamedTuple):
    """An actor's part of a run's environments: ``first .. first + size - 1`` of ``total``."""

    first: int
    size: int
    total: int

    @classmethod
    def all(cls, num_envs: int) -> EnvSlice:
        """Returns the share of an actor that has all environments."""
        return cls(0, num_envs, num_envs)

    def seeds(self, seed: int) -> list[int]:
        """Returns one seed per environment, below 2^31,
        which depends on the environment's index within the run.
        """
        words = np.random.SeedSequence(seed).generate_state(self.total) & 0x7FFFFFFF
        return [int(word) for word in words[self.first : self.first + self.size]]


class HostEnv(Protocol):
    """A batch of environments on the host, stepped with numpy arrays.

    If ``spec.frame_stack`` is more than 1, the observations are either single frames,
    ``frames.Frame``, or full stacks.
    """

    spec: EnvSpec
    num_envs: int

    def reset(self) -> PyTree:
        """Starts an episode in each environment and returns the first observations ``[B, ...]``."""

    def step(self, action: PyTree) -> tuple[Timestep, EpisodeStats]:
        """Steps all environments; arrays as in ``DeviceEnv.step``.

        Raises:
          ValueError: an action is outside the action space; the message names environment and step.
          EnvError: an environment's own code failed, or returned NaN or infinity.
          TimeoutError: an environment has not answered in time.
        """

    def close(self) -> None:
        """Closes the environments and ends their threads."""


class DrawnEnv(HostEnv, Protocol):
    """A ``HostEnv`` that can be drawn, if it was made with ``drawn=True``."""

    def render(self, index: int) -> np.ndarray:
        """Draws one environment in its current state, ``[H, W, 3]`` uint8.

        Raises:
          ConfigError: the environment cannot be drawn.
          TimeoutError: the environment has not answered in time.
        """


# of spaces that policies support
KINDS = ("Discrete", "MultiDiscrete", "MultiBinary", "Box", "Dict", "Tuple")


def space_of(space: PlainSpace, name: str, role: str, kinds: Sequence[str] = KINDS) -> Space:
    """Converts a space to the form that policies see; 64-bit numbers become 32-bit.

    A Tuple becomes a dict with the names "0", "1" and so on.

    Args:
      name: the environment's name, with its backend.
      role: ``observations`` or ``actions``.
      kinds: kinds of spaces that the backend's adapter supports.

    Raises:
      ConfigError: the space is of another kind,
        or has more values than a network can have inputs, one for each.
    """
    if role.endswith(" is"):
        has = f"{role} {space.kind}"
    else:
        has = f"{space.kind} {role}"
    if space.kind not in kinds or space.parts == {}:
        raise ConfigError(f"{name} has {has}{_supported(space, kinds, role)}")
    if space.parts:
        parts = sorted(space.parts.items())
        return {
            part: space_of(inner, name, f"a part {part!r} of its {role} that is", kinds)
            for part, inner in parts
        }
    if (choices := space.num_choices) > MAX_SIZE:
        raise ConfigError(
            f"{name} has {has} with {choices} values; up to {MAX_SIZE} work, and a Box has no such limit"
        )
    if space.kind == "Box":
        return _box(space)
    if space.kind == "Discrete":
        return Discrete(space.sizes[0], space.start)
    sizes = tuple(space.sizes or [2] * math.prod(space.shape))
    return MultiDiscrete(sizes, tuple(space.start or ()), space.shape, space.kind == "MultiBinary")


def _supported(space: PlainSpace, kinds: Sequence[str], role: str) -> str:
    """Says of a space that no policy supports what it lacks, which kinds work,
    and what helps with others.
    """
    listed = f"{' without parts' if space.parts == {} else ''}; {', '.join(kinds[:-1])} and {kinds[-1]} work"
    if "MultiBinary" not in kinds:
        return listed
    if "actions" in role:
        return f"{listed}, and a gymnasium.ActionWrapper can offer one of these instead"
    return f"{listed}, and wrappers such as FlattenObservation make a Box of others"


def _box(space: PlainSpace) -> Box:
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(np.dtype(space.dtype)))
    low, high = (
        np.broadcast_to(np.asarray(bound), space.shape) for bound in (space.low, space.high)
    )
    if np.issubdtype(dtype, np.integer):
        low, high = (
            np.clip(bound, np.iinfo(dtype).min, np.iinfo(dtype).max) for bound in (low, high)
        )
    with np.errstate(over="ignore"):  # bounds beyond float32 become infinite
        return Box(tuple(space.shape), dtype, low.astype(dtype), high.astype(dtype))


def policy_space(native: Any, name: str, role: str, value: Any = None) -> Space:
    """Converts a space of a JAX environment, as ``space_of``;
    dtypes and shapes of ``value`` override its own.
    """

    def overridden(known: PlainSpace, value: Any) -> PlainSpace:
        if known.parts is not None:
            return known._replace(
                parts={name: overridden(part, value[name]) for name, part in known.parts.items()}
            )
        if known.kind != "Box":
            return known
        return known._replace(shape=tuple(value.shape), dtype=np.dtype(value.dtype).name)

    known = check_counted(plain(native), name, role)
    if value is not None:
        known = overridden(known, named(native, value))
    return space_of(known, name, role)


def outcome(resetting: Array, terminated: Array, truncated: Array) -> tuple[Array, Array, Array]:
    """Returns ``(valid, terminated, truncated)`` of a step, by the convention of ``Timestep``;
    all are ``[B]`` bool.

    ``resetting``: where the previous step ended an episode, so that this one is the reset."""
    valid = ~resetting
    terminated = terminated & valid
    return valid, terminated, truncated & valid & ~terminated


def awaited(wait: Callable[[float], Any], seconds: float) -> Any:
    """Calls ``wait`` until its result is true or ``seconds`` have passed,
    and returns the last result.

    It waits in short naps. If this process is stopped meanwhile, as by Ctrl-Z, it loses one nap and
    not the whole time: the other side may have been stopped with it.
    """
    for _ in range(NAPS):
        if answer := wait(seconds / NAPS):
            return answer
    return wait(0.0)


NAPS = 20  # into which ``awaited`` divides its time


def rows_where(condition: jax.Array, x: PyTree, y: PyTree) -> PyTree:
    """Takes rows of ``x`` where ``condition [B]`` is True, else of ``y``."""

    def choose(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(
            condition.reshape(condition.shape + (1,) * (b.ndim - 1)), a.astype(b.dtype), b
        )

    return jax.tree.map(choose, x, y)


def restarted(
    start: Callable[[jax.Array, jax.Array, PyTree], PyTree],
    keys: jax.Array,
    ended: jax.Array,
    stepped: PyTree,
) -> PyTree:
    """Returns ``start(keys, ended, stepped)``, which replaces the rows that begin a new episode.

    On CPUs resets run only when an environment needs one, which makes stepping up to twice as fast.
    A GPU would wait for the host at each condition, and steps so many environments that some have
    ended anyway.

    Args:
      ended: ``[B]`` bool, where the previous step ended an episode; if nowhere,
        ``start`` returns ``stepped``.
    """

    def if_any(keys: jax.Array, ended: jax.Array, stepped: PyTree) -> PyTree:
        return jax.lax.cond(
            mesh.any_member(jnp.any(ended)), start, lambda *rows: rows[2], keys, ended, stepped
        )

    return jax.lax.platform_dependent(keys, ended, stepped, cpu=if_any, default=start)


def checked_action(spec: EnvSpec, action: PyTree, step: int) -> PyTree:
    """Clips continuous actions ``[B, ...]`` to their bounds: an environment may not check them,
    or may crash.

    Raises:
      ValueError: an action is not finite, or outside a discrete space.
    """
    if spec.policies:
        return {
            name: checked_action(part, action[name], step) for name, part in spec.policies.items()
        }
    return jax.tree.map(
        lambda space, part: _checked_part(spec, space, part, step), spec.action, action
    )


def _checked_part(spec: EnvSpec, space: Part, action: np.ndarray, step: int) -> np.ndarray:
    action = np.asarray(action)
    if isinstance(space, Box):
        bad = ~np.isfinite(action)
        action = np.clip(action, space.low, space.high)
    else:
        bad = (action < 0) | (action >= np.asarray(num_choices(space)))
    if bad.any():
        index = int(np.argwhere(bad)[0, 0])
        raise ValueError(
            f"{label_of(spec)}: action {action[index]} of environment {index // spec.num_agents} at step "
            f"{step} lies outside {space}"
        )
    return action


def check_finite(spec: EnvSpec, step: int, field: str, values: PyTree) -> None:
    """Checks that observations or rewards of host environments are finite; integers always are.

    Args:
      step: counted since the environments were made; the first reset counts as step 0.
      field: ``observation`` or ``reward``.
      values: ``[B, ...]``, or a dict of such parts.

    Raises:
      EnvError: a value is NaN or infinity; the message names the first such environment.
    """
    for path, part in leaves(values).items():
        if part.dtype.kind not in "biu" and not np.isfinite(part).all():
            index = int(np.argwhere(~np.isfinite(part))[0, 0])
            shown = f"{path} {part[index]}" if path else part[index]
            owner = spec.policies.get(path.split("/")[0], spec)  # whose rows these are
            raise not_finite(spec, index // owner.num_agents, step, field, shown)


def not_finite(spec: EnvSpec, index: int, step: int, field: str, value: Any = None) -> EnvError:
    """Returns the error for environment ``index`` that gave NaN or infinity;
    ``value`` is that value, if known.
    """
    if field == "observation":
        kind = "an observation"
    else:
        kind = f"a {field}"
    if value is None:
        shown = ""
    else:
        shown = f": {' '.join(str(value).split())[:80]}"
    where = f"{label_of(spec)}: environment {index} at step {step}"
    return EnvError(f"{where} gave {kind} that is not finite{shown}")


def parse_option(env: str, key: str, text: str, default: Any) -> Any:
    """Parses the text of one ``--env-options`` entry as the type of its default.

    Raises:
      ConfigError: the text is not a value of this type.
    """
    kind = type(default)
    try:
        if isinstance(default, (bool, np.bool_)):
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if isinstance(default, (int, np.integer)):
            return int(text)
        if isinstance(default, (float, np.floating)):
            if math.isfinite(number := float(text)):
                return number
            raise ValueError
        if isinstance(default, str):
            return text
    except (KeyError, ValueError):
        raise ConfigError(
            f"--env-options {key} of {env} must be a {kind.__name__} such as {default}, not {text!r}"
        ) from None
    raise ConfigError(
        f"--env-options {key} of {env} is a {kind.__name__}, which cannot be set from the command line"
    )


def check_options(env: str, options: Mapping[str, str], known: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` for an entry of
    ``--env-options`` whose name an environment does not know.
    """
    for key in options:
        if key not in known:
            names = ", ".join(sorted(known)) or "none"
            raise ConfigError(
                f"{env} has no option {key!r}{did_you_mean(key, known)}; it has: {names}"
            )


def parse_options(
    env: str, options: Mapping[str, str], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Parses ``--env-options`` by the names and types of an environment's defaults.

    Raises:
      ConfigError: an unknown name or an unreadable value.
    """
    check_options(env, options, defaults)
    return {key: parse_option(env, key, text, defaults[key]) for key, text in options.items()}
