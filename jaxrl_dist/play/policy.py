"""Loads a trained policy from its run directory, for use in any program."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Never, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxrl_dist import spaces
from jaxrl_dist.actors.evaluate import END_OF_SCHEDULES, MAX_ENVS, Evaluation, Evaluator
from jaxrl_dist.config.synonyms import missing
from jaxrl_dist.config.train import Train
from jaxrl_dist.config.values import varied
from jaxrl_dist.envs.base import label_of
from jaxrl_dist.envs.source import EnvSource
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.heavy import in_32_bits
from jaxrl_dist.play import observations
from jaxrl_dist.protocols import CoreLike, Hyperparameters, TorsoLike, Traits
from jaxrl_dist.run.checkpoint import load_variables, selected_hyper
from jaxrl_dist.run.files import members_of
from jaxrl_dist.run.storage import check_run_dir
from jaxrl_dist.settings.members import best_of, tunable
from jaxrl_dist.settings.policies import label, learner_name
from jaxrl_dist.settings.resolve import find_env, resolved, with_simulations
from jaxrl_dist.settings.stored import of_policy, stored_config
from jaxrl_dist.spaces import clipped
from jaxrl_dist.training.algorithm import make_algorithm, variable_shapes
from jaxrl_dist.types import Acted, Context, PyTree, Report, Timestep, Variables


class Policy:
    """A trained policy: ``(obs, core, key) -> (action, core)``; see ``__call__``."""

    def __init__(
        self, config: Train, source: EnvSource, variables: PyTree, *, fresh: bool = False
    ) -> None:
        """``fresh``: evaluate in other episodes than its run did, as ``Evaluator.of_member``."""
        self.config = config
        self._fresh = fresh
        self.source = source
        self.algorithm = source.spec.bare(make_algorithm(config, source.spec))
        self.variables = variables
        self._act = jax.jit(lambda *inputs: self.choose(*inputs)[:2])
        self._values = jax.jit(self._evaluate)
        self._log_prob = jax.jit(self._weigh)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(missing("this policy", name))

    def __repr__(self) -> str:
        spec = self.source.spec
        params = [variables.params for variables in spec.keyed(self.variables).values()]
        size = sum(x.size for x in jax.tree.leaves(params))
        return f"Policy({label(self.config.algorithm)} on {label_of(spec)}, {size:,} parameters)"

    def __reduce__(self) -> tuple[Any, ...]:
        """Lets users pickle a policy, if its environment and algorithm can be;
        this package never does.
        """
        return _restored, (self.config, jax.tree.map(np.asarray, self.variables), self._fresh)

    @property
    def observation(self) -> PyTree:
        """The ``Space`` of observations, without the parts that only the critic sees."""
        space = self.source.spec.observation
        if not isinstance(space, dict):
            return space
        hidden = Traits.of(self.config.algorithm).hidden
        return {name: part for name, part in space.items() if name not in hidden}

    def initial_core(self, num_envs: int) -> PyTree:
        """Returns the policy state at the start of an episode, for a batch of ``num_envs``;
        ``()`` if it has none.
        """
        return self.algorithm.initial_core(num_envs)

    @in_32_bits
    def __call__(
        self,
        obs: PyTree,
        core: PyTree = None,
        key: jax.Array | None = None,
        reward: ArrayLike | None = None,
        **others: Never,
    ) -> tuple[jax.Array, PyTree]:
        """Chooses actions for a batch of observations.

        Args:
          obs: ``[B, ...]`` as the environment returns them.
          core: the policy state from the last call; None: ``initial_core(B)``,
            the start of all episodes.
          key: a scalar key to sample actions; None for greedy actions.
          reward: ``[B]``, the rewards of the last actions, if the policy was trained with
            ``reward`` in ``core_inputs``; 0 where an episode starts.
          others: are refused.

        Returns:
          Actions ``[B, ...]`` within the environment's bounds,
          and the policy state for the next call. Where an
          episode has ended, the caller replaces its row of the state by a row of ``initial_core``.

        Raises:
          TypeError: there is another argument.
          ValueError: ``obs`` is not a batch of the environment's observations, ``core`` and
            ``reward`` are not of the same batch, ``key`` is not a key, a reward is missing, this
            policy only samples and there is no key, it plans with the environment's simulator
            alone, or this object holds several policies.
        """
        for name in others:
            raise TypeError(missing("this policy", name, "argument"))
        obs, core = self._inputs(obs, core, reward)
        keys = None
        if key is not None:
            keys = jax.random.split(_checked_key(key), jax.tree.leaves(obs)[0].shape[0])
        return self._act(self.variables, obs, core, keys)

    @in_32_bits
    def value(self, obs: PyTree, core: PyTree = None, reward: ArrayLike | None = None) -> jax.Array:
        """Returns the discounted return that the critic expects from these observations, ``[B]``,
        in the environment's rewards, or in clipped ones with ``clip_rewards``.

        With action values instead of a critic, it is the value of the best action. The arguments
        are as for ``__call__``.

        Raises:
          ValueError: as ``__call__``, or the policy has no critic of observations.
        """
        obs, core = self._inputs(obs, core, reward)
        values = self._values(self.variables, obs, core)
        if values is None:
            raise ValueError(
                f"{label(self.config.algorithm)} has no value of an observation; estimate it "
                "with evaluate()"
            )
        return values

    @in_32_bits
    def log_prob(
        self, obs: PyTree, action: PyTree, core: PyTree = None, reward: ArrayLike | None = None
    ) -> jax.Array:
        """Returns the log-probability, or for continuous actions the log-density, ``[B]`` with
        which the policy samples these actions.

        Args:
          action: ``[B, ...]`` as this policy returns them.

        The other arguments are as for ``__call__``.

        Raises:
          ValueError: as ``__call__``, or the policy has no known distribution.
        """
        obs, core = self._inputs(obs, core, reward)
        if self.algorithm.log_prob is None:
            raise ValueError(
                f"{label(self.config.algorithm)} has no known distribution of actions; sample "
                "them with policy(obs, core, key)"
            )
        spec = self.source.spec
        chosen = spaces.untupled(action, spec.tuples, "action")
        actions = spaces.leaves(jax.tree.map(jnp.asarray, chosen))
        counted = {
            path: spaces.counted(part, actions[path])
            for path, part in spaces.leaves(spec.action).items()
        }
        return self._log_prob(self.variables, obs, core, spaces.nested(spec.action, counted))

    def _inputs(self, obs: PyTree, core: PyTree, reward: ArrayLike | None) -> tuple[PyTree, PyTree]:
        """Returns the observations and the core for the algorithm; arguments and errors as for
        ``__call__``.
        """
        if names := ", ".join(self.source.spec.policies):
            raise ValueError(
                f"these are the policies {names}; "
                "load_policy(run_dir, policy=...) loads one that acts"
            )
        obs, num_envs = observations.checked(
            obs, self.source.spec, Traits.of(self.config.algorithm).hidden
        )
        if problem := self.unable():
            raise ValueError(f"{problem}; play it with evaluate()")
        self._check_memory(core, reward, num_envs)
        if core is None:
            core = self.initial_core(num_envs)
        if reward is not None:
            core = self.rewarded(obs, core, reward)
        return obs, core

    def _check_memory(self, core: PyTree, reward: ArrayLike | None, num_envs: int) -> None:
        """Refuses a core or rewards of another batch, and a missing reward."""
        if any((*np.shape(x), None)[0] != num_envs for x in jax.tree.leaves(core)):
            raise ValueError(
                f"the core must have {num_envs} environments, as the observations have"
            )
        if reward is not None and np.shape(reward) != (num_envs,):
            raise ValueError(f"rewards have shape [{num_envs}] here, not {list(np.shape(reward))}")
        reads_reward = "reward" in Traits.of(self.config.algorithm).core_inputs
        if reads_reward and reward is None and core is not None:
            raise ValueError(
                "this policy reads the reward of its last action; "
                "call it as policy(obs, core, key, reward)"
            )

    def unable(self) -> str:
        """Says why observations are not enough for this policy to act; empty: they are."""
        if not self.algorithm.searches or hasattr(self.config.algorithm, "num_simulations"):
            return ""
        return (
            "this policy plans with its environment's simulator, so it cannot act on observations "
            "alone"
        )

    def evaluate(
        self,
        episodes: int = 100,
        seed: int = 0,
        *,
        max_steps: int | None = None,
        sampled: bool | None = None,
        progress: Callable[[int], None] = lambda done: None,
    ) -> Evaluation:
        """Plays episodes like the command ``evaluate``; for arguments and errors see ``Evaluator``.

        Args:
          sampled: sample actions instead of taking the best ones; None:
            as the run's ``evaluation_policy``.
        """
        if episodes < 1:
            raise ConfigError(f"an evaluation plays 1 episode or more, not {episodes}")
        assert self.config.num_envs is not None, "the preset has it"
        evaluator = self.evaluator(episodes, seed, max_steps, sampled, self.config.num_envs)
        evaluation = evaluator.play(self.source.spec.keyed(self.variables), progress)
        assert evaluation is not None, "nothing stops it"
        return evaluation

    def evaluator(
        self,
        episodes: int,
        seed: int,
        max_steps: int | None,
        sampled: bool | None,
        num_envs: int = MAX_ENVS,
    ) -> Evaluator:
        """Returns an ``Evaluator`` of this policy; ``sampled`` as for ``evaluate``.

        Raises:
          ConfigError: it is one of several policies, and cannot play in its environment by itself.
        """
        if self.source.wrappers.policies and not self.source.spec.policies:
            raise ConfigError(
                "a policy plays with the other policies of its run; call "
                "load_policy(run_dir).evaluate()"
            )
        if sampled is None:
            sampled = self.config.evaluation_policy == "sampled"
        algorithm = self.source.spec.keyed(self.algorithm)
        evaluator = Evaluator(
            algorithm, self.source, episodes, seed, max_steps, num_envs, sampled=sampled
        )
        if self._fresh:
            return evaluator.of_member(seed, fresh=True)
        return evaluator

    def rewarded(self, obs: PyTree, core: PyTree, reward: ArrayLike) -> PyTree:
        """Returns the policy state ``[B, ...]`` that has seen the rewards ``[B]`` of the last
        actions.
        """
        rewards = jnp.asarray(reward, jnp.float32)
        none = np.zeros(rewards.shape, bool)
        return self.algorithm.feedback(core, (), Timestep(obs, rewards, none, none, ~none))

    def choose(
        self, variables: Variables, obs: PyTree, core: PyTree, keys: jax.Array | None
    ) -> Acted:
        """As ``types.Policy``, with actions as the environment has them; ``obs`` as
        ``observations.checked`` returns them.
        """
        context = Context(keys, jnp.float32(END_OF_SCHEDULES))
        action, core, extras = self.algorithm.policy(variables, obs, core, context)
        space = self.source.spec.action
        chosen = spaces.leaves(clipped(space, action))
        native = {
            path: spaces.native(part, chosen[path]) for path, part in spaces.leaves(space).items()
        }
        tree = spaces.nested(space, native)
        return spaces.tupled(tree, self.source.spec.tuples, "action"), core, extras

    def _evaluate(self, variables: Variables, obs: PyTree, core: PyTree) -> jax.Array | None:
        """Returns the values of observations; None: the algorithm has none."""
        if self.algorithm.action_values is not None:
            values, _ = self.algorithm.action_values(variables, obs)
            return values.max(-1)
        _, _, extras = self.choose(variables, obs, core, None)
        value: jax.Array | None = extras.get("value")
        if value is None or not self.config.scale_rewards:
            return value
        scale = variables.stats[0]
        return value / scale if self.config.offline else value * scale.std()

    def _weigh(self, variables: Variables, obs: PyTree, core: PyTree, action: PyTree) -> jax.Array:
        assert self.algorithm.log_prob is not None
        context = Context(None, jnp.float32(END_OF_SCHEDULES))
        return self.algorithm.log_prob(variables, obs, core, action, context)


def _restored(config: Train, variables: Variables, fresh: bool) -> Policy:
    """Makes the policy that ``__reduce__`` describes."""
    return Policy(*resolved(config), jax.device_put(variables, jax.local_devices()[0]), fresh=fresh)


def _checked_key(key: object) -> jax.Array:
    """Returns a typed key; converts an old-style key such as ``jax.random.PRNGKey(0)``."""
    if (
        isinstance(key, jax.Array)
        and key.shape == ()
        and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    ):
        return key
    if isinstance(key, jax.Array | np.ndarray) and key.ndim == 1 and key.dtype == np.uint32:
        return jax.random.wrap_key_data(jnp.asarray(key))
    raise ValueError(f"key must be a single key such as jax.random.key(0), not {key!r}")


@in_32_bits
def load_policy(
    run_dir: str | pathlib.Path | Report,
    algorithm: type[Hyperparameters] | None = None,
    *,
    env: Any = None,
    env_options: dict[str, str] | None = None,
    torso: TorsoLike | None = None,
    core: CoreLike | None = None,
    policy: str | None = None,
    checkpoint: str | int | None = None,
    num_simulations: int | None = None,
) -> Policy:
    """Loads the trained policy of a run, or the policy of its newest checkpoint.

    Args:
      run_dir: the run's directory, or a report that is the newest: its policy acts as it is then.
      algorithm: the config class that was trained, if it is not built in.
        A stored file never names code to run.
      env: the environment, if it differs from the run's, or if no file can store the run's, which
        is an object or has the form ``my_module:make``.
      env_options: the environment's options, if they differ from the run's. Where one agent acts
        with these, the policy of a run against copies of itself acts alone.
      torso: your own network, if the run trained one.
      core: your own recurrent core, if the run trained one.
      policy: name of the policy to load, if the run has several. None: all of them,
        to be evaluated but not called.
      checkpoint: env steps of the checkpoint to load instead, or "best" for the one with the
        highest mean return: of training episodes or of evaluations, as the run's ``keep_best``
        says. Where evaluations have judged it, ``evaluate`` plays other episodes than they did.
      num_simulations: steps of each search of an algorithm that plans, if they differ from the
        run's; 0: none, the network acts alone.

    Raises:
      ConfigError: ``run_dir`` has no trained variables or no such checkpoint, is a population or is
        damaged, or its environment cannot be found.
    """
    config = _config_of(run_dir, algorithm, env, torso, core, checkpoint)
    name = policy
    changes = {}
    if env_options is not None:
        changes["env_options"] = env_options
        learning = learner_name(config)
        if policy is None and learning is not None:
            alone = of_policy(config, learning, run_dir)
            if find_env(dataclasses.replace(alone, env_options=env_options)).spec.num_agents == 1:
                config = alone
                name = learning
    config, source = resolved(config, changes)
    if policy is not None:
        config = of_policy(config, policy, run_dir)
        source = source._replace(spec=source.spec.policies[policy])
    if num_simulations is not None:
        config = with_simulations(config, source, num_simulations)
    if isinstance(run_dir, Report):
        variables: Any = run_dir.variables()
        if name is not None:
            variables = variables[name]
    else:
        shapes = variable_shapes(make_algorithm(config, source.spec))
        variables = source.spec.bare(load_variables(run_dir, shapes, name, which=checkpoint))
    variables = jax.device_put(variables, jax.local_devices()[0])
    fresh = checkpoint is not None and config.judge == "evaluation"
    return Policy(config, source, variables, fresh=fresh)


def _config_of(
    run: str | pathlib.Path | Report,
    algorithm: type[Hyperparameters] | None,
    env: Any,
    torso: TorsoLike | None,
    core: CoreLike | None,
    checkpoint: str | int | None,
) -> Train:
    """Returns the config of a run; the arguments are as for ``load_policy``."""
    if isinstance(run, Report):
        known = {"algorithm": algorithm, "torso": torso, "core": core, "checkpoint": checkpoint}
        for name, value in known.items():
            if value is not None:
                raise ConfigError(f"load_policy: a report holds its run's {name}; remove {name}=")
        if run.config is None:
            raise ConfigError("load_policy: this report is of no run; take one from train()")
        config: Train = run.config
        return config if env is None else dataclasses.replace(config, env=env)
    path = pathlib.Path(run)
    check_run_dir(path)
    if members := members_of(path):
        raise ConfigError(
            f"{run} is a population; name one of its members, such as {best_of(path, members)}"
        )
    stored = stored_config(run, algorithm, env, torso=torso, core=core)
    return _with_selected(stored, path, checkpoint)


def _with_selected(config: Train, run_dir: pathlib.Path, checkpoint: str | int | None) -> Train:
    """Returns the config of a member of a population with
    the hyperparameters that a selection has given it.
    """
    selected = selected_hyper(run_dir, checkpoint)
    hyper = {name: value for name, value in selected.items() if name in tunable(config)}
    return dataclasses.replace(config, algorithm=varied(config.algorithm, hyper))
