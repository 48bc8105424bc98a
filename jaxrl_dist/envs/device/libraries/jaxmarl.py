"""JaxMARL: games of several agents (Rutherford et al. 2024, https://arxiv.org/abs/2311.10090)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jaxmarl
import numpy as np
from jaxmarl.environments.mpe.simple import SimpleMPE
from jaxmarl.environments.smax import smax_env
from jaxmarl.environments.smax.heuristic_enemy_smax_env import EnemySMAX

from jaxrl_dist.checks import shown
from jaxrl_dist.envs.agents.groups import Team
from jaxrl_dist.envs.device.libraries import settable
from jaxrl_dist.envs.env_options import parse_options
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.types import PyTree

if TYPE_CHECKING:
    from jaxmarl.environments.multi_agent_env import MultiAgentEnv
    from matplotlib.axes import Axes


class Battle:
    """SMAX, with ``won`` in its info: whether the allies have beaten the enemies,
    and one of them lives.
    """

    def __init__(self, env: smax_env.SMAX | EnemySMAX) -> None:
        self._smax = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._smax, name)

    def step_env(self, key: jax.Array, state: PyTree, actions: PyTree) -> tuple[PyTree, ...]:
        obs, state, rewards, dones, info = self._smax.step_env(key, state, actions)
        # the state of SMAX is within that of heuristic enemies
        inner: PyTree = getattr(state, "state", state)
        alive = inner.unit_alive
        won = alive[: self.num_allies].any() & ~alive[self.num_allies :].any()
        return obs, state, rewards, dones, {**info, "won": won}


CLOCKS: Mapping[str, Mapping[str, Any]] = {"max_steps": {}, "episode_length": {"auto_reset": False}}
"""Arguments that set a time limit, with those that go with them:
MABrax would replace an episode's last observation."""
ROUNDS = "num_inner_steps", "num_outer_steps"
"""Arguments whose product is a time limit: so many rounds, of so many steps each (coin_game)."""


def ids() -> list[str]:
    return list(jaxmarl.registered_envs)


def make(env_id: str, options: Mapping[str, str]) -> Team:
    """Options are the constructor's arguments that are numbers or texts,
    such as ``num_agents`` and ``max_steps``.

    Two others are ``state``, whether observations have a part ``state``, the state of the whole
    environment; and for SMAX ``scenario``, the name of a map, such as ``3m``.
    """
    name = f"jaxmarl:{env_id}"
    env = jaxmarl.make(env_id)
    parameters = _parameters(env)
    defaults = settable(parameters)
    maps = {"scenario": ""} if "scenario" in parameters else {}
    clock = _clock(env)
    known = {**defaults, **maps, **clock, "state": False}
    values: dict[str, Any] = parse_options(name, options, known)
    shows_state = values.pop("state", False)
    if "scenario" in values:
        values["scenario"] = _scenario(name, values["scenario"])
    limit = None
    extended: dict[str, Any] = {}
    # The library would report its time limit as the end of the task,
    # so its limit is one step, or one round, above the one here.
    for argument, default in clock.items():
        limit = values.pop(argument, default)
        extended = {argument: limit + 1, **CLOCKS[argument]}
    if not clock and all(argument in defaults for argument in ROUNDS):
        steps, rounds = (values.get(argument, defaults[argument]) for argument in ROUNDS)
        limit = steps * rounds
        values[ROUNDS[1]] = rounds + 1
    try:
        env = jaxmarl.make(env_id, **values, **extended)
    except TypeError:  # a few have a limit that no argument sets
        env = jaxmarl.make(env_id, **values)
    team = Battle(env) if hasattr(env, "num_allies") else env
    return Team(team, "jaxmarl", limit, shows_state, _render(env))


def _parameters(env: MultiAgentEnv) -> dict[str, object]:
    """Returns the defaults of the constructor's arguments,
    and of arguments that it passes on to another environment.
    """
    arguments = inspect.signature(type(env)).parameters.values()
    defaults: dict[str, object] = {}
    if any(x.kind is x.VAR_KEYWORD for x in arguments) and "_env" in vars(env):
        defaults = _parameters(env._env)
    return defaults | {argument.name: argument.default for argument in arguments}


def _clock(env: MultiAgentEnv) -> dict[str, int]:
    """Returns the argument that sets the environment's time limit, with the limit, if one does."""
    for argument in CLOCKS:
        limit = getattr(env, argument, None)
        if limit is not None:
            return {argument: int(limit)}
    return {}


def _render(env: MultiAgentEnv) -> Callable[[PyTree], np.ndarray] | None:
    """Returns what draws a state of the environment, if anything does."""
    for kind, draw in DRAWN.items():
        if isinstance(env, kind):
            return partial(_picture, partial(draw, env))
    return None


def _scenario(name: str, map_name: str) -> PyTree:
    """Returns the library's description of a map.

    Raises:
      ConfigError: there is none.
    """
    maps = smax_env.MAP_NAME_TO_SCENARIO
    if map_name not in maps:
        raise ConfigError(f"{name} has no scenario {shown(map_name)}; it has: {', '.join(maps)}")
    return maps[map_name]


# --- Pictures -------------------------------------------------------------------------------------


def _particles(env: SimpleMPE, state: PyTree, ax: Axes) -> None:
    """Draws as the library's ``MPEVisualizer``, which works on a window of pyplot;
    small circles lie on large ones.
    """
    from matplotlib.patches import Circle

    ax.set(xlim=(-2, 2), ylim=(-2, 2), aspect="equal", title=f"Step {state.step}")
    circles = zip(state.p_pos, env.rad.tolist(), env.colour, strict=False)
    # the colours of push's landmarks are plain numbers, one too many
    for place, radius, colour in circles:
        ax.add_patch(
            Circle(place, radius, color=np.broadcast_to(colour, 3) / 255, zorder=1 / radius)
        )
    senders = [agent for agent, silent in enumerate(env.silent) if not silent]
    said = [
        f"{env.agents[agent]} sends {chr(ord('A') + state.c[agent].argmax())}" for agent in senders
    ]
    ax.text(-1.95, -1.95, "\n".join(said))


def _battle(env: smax_env.SMAX | EnemySMAX, state: PyTree, ax: Axes) -> None:
    """Draws by the library's own function; shots of the step are half way to their targets."""
    state = getattr(state, "state", state)
    agents = getattr(env, "all_agents", env.agents)
    actions = dict(zip(agents, state.prev_attack_actions, strict=True))
    with jax.disable_jit():  # else it compiles its branches for each picture
        shown = env.init_render(
            ax, (None, state, actions), env.world_steps_per_env_step / 2, state.step
        )
    shown.remove()  # a copy of the picture within it


DRAWN: Mapping[type, Callable[[Any, PyTree, Axes], None]] = {
    SimpleMPE: _particles,
    smax_env.SMAX: _battle,
    EnemySMAX: _battle,
}
"""What draws a state ``(env, state, axes)``, by the class of the games."""


def _picture(draw: Callable[[PyTree, Axes], None], state: PyTree) -> np.ndarray:
    """Returns what ``draw`` puts on axes, ``[320, 320, 3]`` uint8."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    canvas = FigureCanvasAgg(Figure((4, 4), dpi=80, layout="tight"))
    draw(state, canvas.figure.add_subplot())
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]
