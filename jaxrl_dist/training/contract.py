"""What an algorithm's functions must return, checked where they are traced: structure,
shapes and dtypes.

``train`` ends with the first fault of a user's algorithm, before anything is compiled, and
``check-algorithm`` lists all; both say the same of each.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_dist import mesh, spaces
from jaxrl_dist.actors.step import blank_rollout
from jaxrl_dist.algorithms import name_of, unannotated
from jaxrl_dist.checks import check_range, did_you_mean, flag
from jaxrl_dist.config.plans import PLANS
from jaxrl_dist.config.train import Train
from jaxrl_dist.config.values import marked
from jaxrl_dist.envs.base import label_of
from jaxrl_dist.envs.contract import Contract, of_library, shown, traced
from jaxrl_dist.envs.native import described
from jaxrl_dist.errors import ConfigError, ConfigWarning
from jaxrl_dist.learners.on_policy import examples_per_env
from jaxrl_dist.learners.sgd import losses_of
from jaxrl_dist.nn import cores
from jaxrl_dist.nn.optimizers import OptimizerConfig
from jaxrl_dist.protocols import Hyperparameters
from jaxrl_dist.settings.policies import by_policy, naming
from jaxrl_dist.types import (
    Algorithm,
    Context,
    EnvSpec,
    PyTree,
    Rollout,
    Timestep,
    Variables,
)

_FLOAT = jax.ShapeDtypeStruct((), jnp.float32)
_INT = jax.ShapeDtypeStruct((), jnp.int32)


class Strict(Contract):
    """The first fault of an algorithm raises ``ConfigError``."""

    def stop(self, kind: str, text: str, cause: BaseException | None = None) -> Exception:
        return ConfigError(f"{self.name}: {text}")


def check_own(config: Train, spec: EnvSpec, num_devices: int) -> None:
    """Checks the algorithms of a resolved config that are not ours, which are tested.

    Raises:
      ConfigError: the first fault.
    """
    for policy, part in by_policy(config).items():
        if not of_library(type(part.algorithm)):
            with naming(policy):
                own_spec = spec.by_policy[policy]
                check_algorithm(Strict(name_of(part.algorithm)), part, own_spec, num_devices)
                _warn_of_optimizer(part, own_spec)


def _warn_of_optimizer(config: Train, spec: EnvSpec) -> None:
    """Warns of flags of the optimiser that the user's algorithm replaces."""
    algorithm = config.algorithm
    given = [
        flag(name)
        for name in marked(OptimizerConfig)
        if getattr(algorithm, name, None) != getattr(type(algorithm), name, None)
    ]
    if given and replaces_optimizer(algorithm, spec):
        warnings.warn(
            f"{', '.join(given)} may have no effect, because {name_of(algorithm)} replaces the "
            "optimizer that they choose; remove them unless its code reads them",
            ConfigWarning,
            stacklevel=4,
        )


def replaces_optimizer(algorithm: Hyperparameters, spec: EnvSpec) -> bool:
    """Returns whether an algorithm has the flags of an optimiser, but not that optimiser: its state
    has the same structure whichever optimiser they name.
    """
    if not isinstance(algorithm, OptimizerConfig):
        return False
    structures = set()
    for name in ("sgd", "adam"):
        other: Any = dataclasses.replace(algorithm, optimizer=name)
        with cores.made_for(other):
            made = other.make(spec)
        params = jax.eval_shape(made.init, jax.random.key(0)).params
        structures.add(jax.tree.structure(jax.eval_shape(made.optimizer.init, params)))
    return len(structures) == 1


def check_algorithm(
    contract: Contract, config: Train, spec: EnvSpec, num_devices: int
) -> Algorithm:
    """Makes the algorithm of a resolved config,
    traces each of its functions and checks all that they return.

    Raises:
      ConfigError: the algorithm does not support the environment.
    """
    algorithm = _make(contract, config, spec)
    contract.begin("tracing its functions")
    acting_devices = 1 if PLANS[config.plan].sends_gradients else num_devices
    rows = max(1, config.num_envs * spec.num_agents // acting_devices)
    functions = _Functions(contract, algorithm, spec, rows)
    variables = functions.init()
    target = functions.updating(variables.params)
    greedy = bool(config.evaluation_episodes) and config.evaluation_policy != "sampled"
    obs, core = functions.acting(variables, greedy=greedy)
    length = config.rollout_length
    rollout: Rollout = jax.eval_shape(
        partial(blank_rollout, algorithm, rollout_length=length), variables, obs, core
    )
    functions.update_stats(variables, rollout, target)
    replay = algorithm.replay
    window = algorithm.window
    if replay is None:
        per_env = examples_per_env(algorithm, length)
        count = rows * per_env
        size = max(1, count // algorithm.num_minibatches)
        order = f"{rows} environments x {per_env} examples of each, all of environment 0 first"
    elif window is None:
        return algorithm  # which ``learner.check_sizes`` refuses
    else:
        count = size = max(1, replay.batch_size // num_devices)
        order = f"one for each of {count} windows of {window + 1} observations"
        rollout = _windows(rollout, window, count)
    batch = functions.postprocess(variables, rollout, target, count, order)
    examples = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), batch)
    functions.loss(variables, examples, target, size)
    contract.halt()
    return algorithm


def _make(contract: Contract, config: Train, spec: EnvSpec) -> Algorithm:
    """Makes the algorithm, and checks its numbers."""
    if fault := unannotated(type(config.algorithm)):
        raise contract.stop("fields", fault)
    place = _place(config.algorithm.make)
    with cores.made_for(config.algorithm):
        algorithm = contract.call("make", config.algorithm.make, spec)
    if not isinstance(algorithm, Algorithm):
        raise contract.stop(
            "make", f"make{place} returned {described(algorithm)}; return an Algorithm"
        )
    replay = algorithm.replay
    window = algorithm.window
    try:
        check_range(algorithm, "window", "num_epochs", "num_minibatches", low=1)
        if replay is not None:
            check_range(replay, "capacity", "batch_size", low=1)
            check_range(replay, "ratio", above=0)
            check_range(replay, "learning_starts", "priority_exponent", low=0)
    except ConfigError as error:
        raise contract.stop("numbers", f"make{place} returned an Algorithm whose {error}") from None
    if window is not None and replay is None and window > config.rollout_length:
        raise contract.stop(
            "numbers",
            f"make{place} returned an Algorithm with the window {window} does not fit into "
            f"--rollout-length {config.rollout_length}; use --rollout-length {window}",
        )
    return algorithm


class _Functions(NamedTuple):
    """The functions of an algorithm; each method traces one or some, and checks what they return.

    Shapes and dtypes stand for arrays.
    """

    contract: Contract
    algorithm: Algorithm
    spec: EnvSpec
    rows: int
    """Environments that act together, ``B``; each agent counts as one."""

    def init(self) -> Variables:
        init = self.algorithm.init
        variables = self.contract.call("init", traced, init, _keys())
        if not isinstance(variables, Variables):
            raise self.contract.stop(
                "init",
                f"init{_place(init)} returned {described(variables)}; return Variables(params, "
                "stats), with () for stats if there are none",
            )
        self.contract.arrays(variables, "what init returned")
        self.contract.halt()
        return variables

    def updating(self, params: PyTree) -> PyTree:
        """Checks optimiser and target network; returns the target."""
        call = self.contract.call
        optimizer = self.algorithm.optimizer
        if not isinstance(optimizer, optax.GradientTransformation):
            raise self.contract.stop(
                "optimizer",
                f"optimizer is {described(optimizer)}; use one of optax, such as optax.adam(3e-4)",
            )

        def update(params: PyTree, state: PyTree, env_step: jax.Array, count: jax.Array) -> PyTree:
            extra = {"env_step": env_step, "updates_done": count}
            return optax.with_extra_args_support(optimizer).update(params, state, params, **extra)

        state = call("the optimizer", traced, optimizer.init, params)
        updates, after = call("the optimizer", traced, update, params, state, _FLOAT, _INT)
        self._check_same("the update of params", params, updates, "init", "the optimizer")
        self._check_same("the optimizer's state", state, after, "its init", "its update")
        target = call("initial_target", traced, self.algorithm.initial_target, params)
        self.contract.arrays(target, "the target of initial_target")
        self.contract.halt()
        later = call("target", traced, self.algorithm.target, params, target, _INT)
        name = f"target{_place(self.algorithm.target)}"
        self._check_same("the target", target, later, "initial_target", name)
        return target

    def acting(self, variables: Variables, *, greedy: bool) -> tuple[PyTree, PyTree]:
        """Checks the functions that act; returns an observation and a core, ``[B, ...]``."""
        algorithm = self.algorithm
        call = self.contract.call
        rows = self.rows
        zeros = partial(spaces.zeros, self.spec.observation, rows)
        obs = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, zeros()))
        core = call("initial_core", traced, partial(algorithm.initial_core, rows))
        self._check_rows(f"the core of initial_core{_place(algorithm.initial_core)}", core)
        self.contract.halt()
        action = self._policy(variables, obs, core, Context(_keys(rows), _FLOAT))
        if greedy:
            self._policy(variables, obs, core, Context(None, _FLOAT))
        reward = jax.ShapeDtypeStruct((rows,), jnp.float32)
        flag = jax.ShapeDtypeStruct((rows,), jnp.bool_)
        step = Timestep(obs, reward, flag, flag, flag)
        later = call("feedback", traced, algorithm.feedback, core, action, step)
        self._check_core(core, later, f"feedback{_place(algorithm.feedback)}")
        if algorithm.behaviour is not None:
            context = Context(_keys(), _FLOAT)
            result = call("behaviour", traced, algorithm.behaviour, variables, core, context)
            name = f"behaviour{_place(algorithm.behaviour)}"
            params, later = self.contract.returned(name, result, ("params", "core"))
            self._check_rows(f"the params of {name}", params)
            self._check_core(core, later, name)
        self.contract.halt()
        return obs, core

    def _policy(self, variables: Variables, obs: PyTree, core: PyTree, context: Context) -> PyTree:
        """Checks the policy, which acts greedily without keys; returns its action."""
        contract = self.contract
        policy = self.algorithm.policy
        doing = "the policy"
        name = f"policy{_place(policy)}"
        if context.keys is None:
            doing = GREEDY
            name += " without keys"
        result = contract.call(doing, traced, policy, variables, obs, core, context)
        action, later, extras = contract.returned(name, result, ("action", "core", "extras"))
        self._check_action(name, action)
        self._check_core(core, later, name)
        self._check_rows(f"the extras of {name}", extras)
        contract.halt()
        return action

    def _check_action(self, name: str, action: PyTree) -> None:
        parts = spaces.leaves(self.spec.action)
        actions = spaces.leaves(action)
        if parts.keys() != actions.keys():
            wanted = "no parts"
            if isinstance(self.spec.action, dict):
                wanted = ", ".join(map(repr, parts))
            raise self.contract.stop(
                "action",
                f"{name} returned the action {_shown(action)}; {label_of(self.spec)} takes "
                f"{wanted}",
            )
        for path, part in parts.items():
            x = actions[path]
            shape = (self.rows, *part.shape)
            is_float = isinstance(part, spaces.Box)
            dtype = "float32" if is_float else "int32"
            kind = jnp.floating if is_float else jnp.integer
            if not hasattr(x, "dtype") or x.shape != shape or not jnp.issubdtype(x.dtype, kind):
                where = path and f" {path!r}"
                self.contract.fault(
                    "action",
                    f"{name} returned the action{where} {_shown(x)}; {label_of(self.spec)} needs "
                    f"{dtype}{list(shape)}, one for each of {self.rows} environments",
                )

    def update_stats(self, variables: Variables, rollout: Rollout, target: PyTree) -> None:
        function = self.algorithm.update_stats
        if function is None:
            return
        context = Context(None, _FLOAT, target)
        stats = self.contract.call(
            "update_stats", traced, mesh.by_hand(function), variables, rollout, context
        )
        name = f"update_stats{_place(function)}"
        self._check_same("the stats", variables.stats, stats, "init", name)
        self.contract.halt()

    def postprocess(
        self, variables: Variables, rollout: Rollout, target: PyTree, count: int, order: str
    ) -> PyTree:
        """Returns the batch, which must have ``count`` examples in this order."""
        context = Context(_keys(rollout.reward.shape[1]), _FLOAT, target)
        name = f"postprocess{_place(self.algorithm.postprocess)}"
        function = mesh.by_hand(_listing(self.algorithm.postprocess, "rollout.extras"))
        batch = self.contract.call("postprocess", traced, function, variables, rollout, context)
        if not jax.tree.leaves(batch):
            raise self.contract.stop(
                "batch", f"{name} returned no arrays, and a batch of {count} examples is needed"
            )
        for path, x in jax.tree.leaves_with_path(batch):
            if x.shape[:1] != (count,):
                hint = ""
                if x.shape[:2] == rollout.reward.shape:
                    hint = "; [T, B] is time-major, and jaxrl_dist.types.swap_axes makes it [B, T]"
                raise self.contract.stop(
                    "batch",
                    f"{name} returned batch{jax.tree_util.keystr(path)} {_shown(x)}; its first "
                    f"axis must be {count}, {order}{hint}",
                )
        return batch

    def loss(self, variables: Variables, batch: PyTree, target: PyTree, size: int) -> None:
        """Checks the loss of an update's ``size`` examples."""
        context = Context(_keys(size), _FLOAT, target)
        function = mesh.by_hand(_listing(partial(losses_of, self.algorithm), "batch"))
        try:
            losses, _, aux = self.contract.call(
                "the loss", traced, function, variables, batch, context
            )
        except ConfigError as error:
            return self.contract.refuse("loss", error)
        name = f"loss{_place(self.algorithm.loss)}"
        if not jnp.issubdtype(losses.dtype, jnp.floating):
            self.contract.fault(
                "losses",
                f"{name} returned losses {_shown(losses)}; return float32, which has a gradient",
            )
        for metric, x in aux.metrics.items():
            if x.shape != losses.shape:
                self.contract.note(
                    f"{name} returned the metric {metric!r} as one number; return one for each "
                    "example, because a mean would count those that the mask leaves out"
                )

    def _check_rows(self, subject: str, tree: PyTree) -> None:
        self.contract.arrays(tree, subject)
        for path, x in jax.tree.leaves_with_path(tree):
            if getattr(x, "shape", (self.rows,))[:1] != (self.rows,):
                where = f" at {jax.tree_util.keystr(path)}" if path else ""
                self.contract.fault(
                    subject,
                    f"{subject}{where} is {_shown(x)}; its first axis must be {self.rows}, the "
                    "environments",
                )

    def _check_core(self, core: PyTree, later: PyTree, after: str) -> None:
        self._check_same("the core", core, later, "initial_core", after)

    def _check_same(
        self, subject: str, first: PyTree, later: PyTree, before: str, after: str
    ) -> None:
        """Checks that a function keeps structure, shapes and dtypes of what it changes."""
        structure: object = jax.tree.structure(first)
        if structure == jax.tree.structure(later):
            self.contract.same(subject, first, later, before, after)
        else:
            self.contract.fault(
                subject,
                f"{subject} after {after} is {_shown(later)}, and after {before} {_shown(first)}",
            )


GREEDY = (
    "the policy must act greedily where context.keys is None, as in evaluations "
    "(--evaluation-policy sampled gives them keys); it"
)
"""How a fault of greedy acting begins."""


def _listing(
    function: Callable[[Variables, PyTree, Context], PyTree], what: str
) -> Callable[[Variables, PyTree, Context], PyTree]:
    """Returns a function of ``(variables, rollout or batch, context)``
    whose KeyErrors list the names in ``what``.
    """

    def call(variables: Variables, data: PyTree, context: Context) -> PyTree:
        try:
            return function(variables, data, context)
        except KeyError as error:
            names = data.extras if isinstance(data, Rollout) else data
            key = str(*error.args[:1])
            if isinstance(names, dict) and names and key not in names:
                error.add_note(
                    f"{what} has {', '.join(map(repr, sorted(names)))}{did_you_mean(key, names)}"
                )
            raise

    return call


def _windows(rollout: Rollout, length: int, count: int) -> Rollout:
    """Returns the shapes and dtypes of ``count`` replayed windows of a rollout."""
    cut = length - rollout.reward.shape[0]

    def drawn(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((x.shape[0] + cut, count, *x.shape[2:]), x.dtype)

    windows: Rollout = jax.tree.map(drawn, rollout._replace(core=(), final_core=()))
    return windows


def _keys(*shape: int) -> PyTree:
    """Returns the shape of keys, or of one key."""
    return jax.eval_shape(
        lambda: jax.random.split(jax.random.key(0), shape) if shape else jax.random.key(0)
    )


def _shown(tree: PyTree) -> str:
    """Returns dtypes and shapes, such as ``float32[8, 1]``; of a tree with its structure."""

    def leaf(x: PyTree) -> str:
        if hasattr(x, "dtype"):
            return f"{x.dtype}{list(x.shape)}"
        return described(x)

    return shown(jax.tree.map(leaf, tree)).replace("'", "")


def _place(function: Callable[..., object]) -> str:
    """Returns where a user's function stands, such as `` (my_algo.py, line 40)``;
    empty for one of ours.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or of_library(function):
        return ""
    return f" ({os.path.basename(code.co_filename)}, line {code.co_firstlineno})"
