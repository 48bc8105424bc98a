"""What other libraries call our settings, on the command line and in Python,
and other wrong calls from Python.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from typing import Any

import gymnasium
import pytest

import jaxrl_dist
from jaxrl_dist import algorithms, cli
from jaxrl_dist.algorithms import ALGORITHMS, config_class, having
from jaxrl_dist.algorithms.dqn import DQN
from jaxrl_dist.algorithms.ppo import PPO
from jaxrl_dist.algorithms.td3 import TD3
from jaxrl_dist.commands import flags
from jaxrl_dist.config.synonyms import INSTEAD, MEANT, SYNONYMS
from jaxrl_dist.errors import ConfigError, ConfigWarning

pytestmark = pytest.mark.quick

TRAIN = {field.name for field in dataclasses.fields(jaxrl_dist.Train)}
OWN = {
    name: {field.name for field in dataclasses.fields(config_class(name))} for name in ALGORITHMS
}
COMMANDS = {"episodes"}  # of evaluate


def test_every_synonym_means_a_field_that_there_is() -> None:
    fields = TRAIN.union(COMMANDS, *OWN.values())
    unknown = {field for names in MEANT.values() for field in names} - fields
    assert not unknown
    names = [name for names in SYNONYMS.values() for name in names.split()]
    assert len(set(names)) == len(names), "one name means two things"
    assert not set(names) & (TRAIN | INSTEAD.keys()), (
        "a field of every run is no other library's name"
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_synonym_hides_a_setting(name: str) -> None:
    """Whatever an algorithm has is taken as that, though elsewhere the name means another
    setting.
    """
    for field in OWN[name] & MEANT.keys():
        assert flags.read([flags.flag(field), "1"], dict.fromkeys(OWN[name], str)) == {field: "1"}


PPO_ON, DQN_ON = "train ppo --env CartPole-v1 ", "train dqn --env CartPole-v1 "
CALLS = {
    # Stable-Baselines3 and its zoo
    PPO_ON + "--lr 3e-4": "unknown flag --lr; it is --learning-rate here",
    PPO_ON + "--gamma 0.9": "it is --discount here",
    PPO_ON + "--n-steps 128": "it is --rollout-length here",
    "train ppo MlpPolicy --env CartPole-v1": "--torso and --hidden-sizes choose the network",
    "train ppo CartPole-v1": "unknown argument 'CartPole-v1'; name an environment with --env CartPole-v1",
    PPO_ON + "--seeds 0,1,2": "whole number; --seeds 3 runs three seeds, --seed 7",
    PPO_ON + "--use-sde": "unknown flag --use-sde; --noise-correlation 0.6 makes noise last",
    PPO_ON + "--n-envs 4": "it is --num-envs here",
    PPO_ON + "--n-timesteps 1e6": "it is --total-env-steps here",
    PPO_ON + "--total-timesteps 1e6": "it is --total-env-steps here",
    PPO_ON
    + "--total_timesteps=1e6": "unknown flag --total_timesteps; it is --total-env-steps here",
    PPO_ON + "--ent-coef 0.01": "it is --entropy-coefficient here",
    PPO_ON + "--vf-coef 0.5": "it is --value-coefficient here",
    PPO_ON + "--clip-range 0.2": "it is --clip-epsilon here",
    PPO_ON + "--n-epochs 10": "it is --num-epochs here",
    PPO_ON + "--max-grad-norm 0.5": "it is --max-gradient-norm here",
    PPO_ON
    + "--batch-size 64": "it is --num-minibatches here, the number of minibatches in a rollout, not their size",
    PPO_ON + "--normalize-advantage": "it is --normalize-advantages here",
    PPO_ON
    + "--policy MlpPolicy": "--torso chooses a network; several policies are --policy NAME=ALGO:AGENTS",
    PPO_ON + "--policy-kwargs x": "unknown flag --policy-kwargs",
    PPO_ON + "--eval-freq 1000": "it is --evaluation-interval here",
    PPO_ON + "--n-eval-episodes 5": "it is --evaluation-episodes here",
    PPO_ON + "--tensorboard-log runs": "it is --tensorboard here",
    PPO_ON + "--save-freq 1000": "it is --checkpoint-interval here",
    PPO_ON + "--env-kwargs a=1": "it is --env-options here",
    PPO_ON
    + "--device cuda": "training uses every accelerator that JAX finds; --num-devices N uses fewer",
    PPO_ON + "--trained-agent x": "it is --init-from here",
    DQN_ON + "--buffer-size 1000": "it is --replay-capacity here",
    DQN_ON + "--train-freq 4": "it is --replay-ratio here",
    DQN_ON + "--exploration-fraction 0.1": "it is --epsilon-steps here",
    DQN_ON + "--exploration-final-eps 0.1": "it is --epsilon-end here",
    DQN_ON + "--target-update-interval 9": "it is --target-period here",
    "train td3 --env Pendulum-v1 --tau 0.005": "it is --target-rate here",
    "train td3 --env Pendulum-v1 --policy-delay 2": "it is --actor-period here",
    "train sac --env Pendulum-v1 --ent-coef auto": "it is --temperature here",
    "train --algo ppo --env CartPole-v1": "which algorithm? Such as: jaxrl-dist train ppo --env CartPole-v1",
    PPO_ON + "--num-seeds 3": "it is --seeds here",
    PPO_ON + "--random-seed 3": "it is --seed here",
    PPO_ON + "--progress-bar": "--quiet hides it; in Python use jaxrl_dist.display(reports, total)",
    PPO_ON + "--sde": "--noise-correlation 0.6 makes noise last",
    PPO_ON
    + "--deterministic": "it is --evaluation-policy here, greedy (deterministic) or sampled (stochastic)",
    # CleanRL
    PPO_ON + "--save-model": "a run saves its policy in its --run-dir",
    "train ppo --env-id CartPole-v1": "it is --env here",
    PPO_ON + "--num-steps 128": "it is --rollout-length here",
    PPO_ON + "--update-epochs 4": "it is --num-epochs here",
    PPO_ON + "--clip-coef 0.2": "it is --clip-epsilon here",
    PPO_ON + "--no-anneal-lr": "it is --learning-rate-schedule here",
    PPO_ON + "--no-norm-adv": "it is --normalize-advantages here",
    PPO_ON + "--no-cuda": "and JAX_PLATFORMS=cpu none",
    PPO_ON + "--track": "it is --wandb here",
    PPO_ON + "--capture-video": "`jaxrl-dist video RUN_DIR FILE.gif` films a trained policy",
    PPO_ON + "--torch-deterministic": "results are reproducible without it",
    PPO_ON + "--exp-name x": "it is --run-dir here",
    DQN_ON + "--n-sampled-goal 4": "it is --her here, a share of the replayed steps",
    DQN_ON + "--xyz": "unknown flag --xyz; --help lists the flags",  # which --gather is not near
    DQN_ON + "--replay": "unknown flag --replay (did you mean '--replay-ratio'?)",
    DQN_ON + "--start-e 1": "it is --epsilon-start here",
    DQN_ON + "--target-network-frequency 500": "it is --target-period here",
    # RLlib, Sample Factory and others
    PPO_ON + "--num-gpus 1": "it is --num-devices here",
    PPO_ON + "--gpu 0": "training uses every accelerator",
    PPO_ON + "--num-workers 4": "it is --num-actors here",
    PPO_ON + "--lambda 0.95": "it is --gae-lambda here",
    PPO_ON + "--entropy-coeff 0.01": "it is --entropy-coefficient here",
    PPO_ON + "--num-sgd-iter 4": "it is --num-epochs here",
    PPO_ON + "--rollout 32": "it is --rollout-length here",
    PPO_ON + "--train-for-env-steps 9": "it is --total-env-steps here",
    PPO_ON + "--normalize-input": "it is --normalize-observations here",
    PPO_ON + "--env-frameskip 4": "it is --action-repeat here",
    PPO_ON + "--fcnet-hiddens 64": "it is --hidden-sizes here",
    PPO_ON + "--use-rnn": "it is --core here",
    PPO_ON
    + "--adam-eps 1e-8": "--optimizer takes optax's defaults; an algorithm file of yours can name others",
    PPO_ON + "--resume": "`jaxrl-dist resume RUN_DIR` continues a run",
    PPO_ON
    + "--buffer-size 9": "it is --replay-capacity here, and only dqn, rainbow, r2d2, alphazero, muzero, qmix, ddpg",
    "train pqn --env CartPole-v1 --core gru": "--core is not a flag of pqn; ppo, a2c, pg, impala, appo",
    "train pqn --env CartPole-v1 --use-lstm": "it is --core here, and only ppo",
    DQN_ON
    + "--gae-lambda 1": "--gae-lambda is not a flag of dqn; ppo, a2c, appo, alphazero and a3c have it",
    PPO_ON + "--noise pink": "--noise is not a flag of ppo; ddpg, td3, apex-ddpg,",
    DQN_ON + "--no-q-lambda": "--no-q-lambda is not a flag of dqn; pqn has it",
    "train r2d2 --env CartPole-v1 --core none": "r2d2 needs a recurrent core, but --core is none; use dqn",
    # values
    PPO_ON + "--core rnn": "--core must be one of none, gru, lstm, attention, linear, not 'rnn'",
    PPO_ON + "--plan ondevice": "not 'ondevice' (did you mean 'on_device'?)",
    PPO_ON
    + "--seed 0 1 2": "--seed takes one value; remove '1'; --seeds 3 runs three seeds, --seed 7",
    PPO_ON
    + "--normalize-advantages false": "takes no value; remove 'false'; --no-normalize-advantages",
    PPO_ON + "--no-normalize-advantages 0": "--no-normalize-advantages takes no value; remove '0'",
    PPO_ON + "--hidden-sizes 64,x": "--hidden-sizes: 'x' is not a whole number",
    # other commands
    "evaluate runs/x --stochastic": "it is --evaluation-policy here",
    "evaluate runs/x --n-episodes 5": "it is --episodes here",
    "video runs/x x.gif --frames 9": "unknown flag --frames; --help lists the flags",
    "evaluate runs/x --seed 0 1": "--seed takes one value; remove '1'\n",
    "evaluate nothing": "nothing is not a run directory: it does not exist",
    "evaluate .": ". is not a run directory: it has no config.json",
    "tune ppo": "unknown command 'tune'",
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_from_another_library_is_told_what_is_meant(
    call: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(shlex.split(call)) == 2
    out, err = capsys.readouterr()
    assert CALLS[call] in err and err.count("\n") == 1 and len(err) < 300 and out == ""


def preset(**changes: Any) -> Any:
    return jaxrl_dist.preset("ppo", "CartPole-v1", **changes)


IN_PYTHON: dict[str, tuple[Callable[[], Any], str]] = {
    "lr": (
        lambda: preset(lr=1e-3),
        "neither Train nor ppo has a field 'lr'; it is learning_rate here",
    ),
    "gamma": (lambda: preset(gamma=0.9), "it is discount here"),
    "n_envs": (lambda: preset(n_envs=8), "it is num_envs here"),
    "policy": (lambda: preset(policy="MlpPolicy"), "torso chooses a network"),
    "device": (
        lambda: preset(device="cuda"),
        "num_devices N uses fewer, and JAX_PLATFORMS=cpu none",
    ),
    "text": (lambda: preset(learning_rate="1e-3"), "learning_rate must be a number, not '1e-3'"),
    "a core of pqn": (
        lambda: jaxrl_dist.preset("pqn", "CartPole-v1", core="gru"),
        "neither Train nor pqn has a field 'core'; ppo, a2c, pg, impala, appo",
    ),
    "a hyperparameter of Train": (
        lambda: jaxrl_dist.Train("ppo", env="CartPole-v1", learning_rate=1e-3),
        "Train has no field 'learning_rate'; hyperparameters belong to the algorithm, as in jaxrl_dist.preset('ppo'",
    ),
    "timesteps of Train": (
        lambda: jaxrl_dist.Train("ppo", total_timesteps=9),
        "it is total_env_steps here",
    ),
    "a wrong field of Train": (
        lambda: jaxrl_dist.Train("ppo", num_env=9),
        "(did you mean 'num_envs'?)",
    ),
    "lr of PPO": (lambda: PPO(lr=1e-3), "PPO has no field 'lr'; it is learning_rate here"),  # type: ignore[call-arg]
    "a memory of PPO": (
        lambda: PPO(buffer_size=9),
        "it is replay_capacity here, and only other algorithms have it",
    ),  # type: ignore[call-arg]
    "n_envs of PPO": (
        lambda: PPO(n_envs=9),
        "PPO has no field 'n_envs'; it is num_envs here, and only Train has it",
    ),  # type: ignore[call-arg]
    "n_envs in a preset": (
        lambda: jaxrl_dist.preset(
            type("Mine", (PPO,), {"preset": lambda spec: {"n_envs": 8}}), "CartPole-v1"
        ),
        "the preset of Mine: neither Train nor Mine has a field 'n_envs'; it is num_envs here",
    ),
    "a policy of PPO": (
        lambda: PPO("MlpPolicy"),  # type: ignore[arg-type]
        "by name, but 'MlpPolicy' has none; training is `for report",
    ),
    "a switch": (lambda: DQN(duble=True), "DQN has no field 'duble' (did you mean 'double'?)"),  # type: ignore[call-arg]
    "a dictionary": (
        lambda: jaxrl_dist.train({}),
        "train takes one config, such as Train('ppo', env='CartPole-v1')",
    ),  # type: ignore[arg-type]
    "a name": (lambda: jaxrl_dist.train("ppo"), "train takes one config, such as Train("),  # type: ignore[arg-type]
    "a name and an environment": (
        lambda: jaxrl_dist.train("ppo", "CartPole-v1"),  # type: ignore[arg-type]
        "train takes one config, such as Train('ppo', env='CartPole-v1'), not ('ppo', 'CartPole-v1')",
    ),
    "a field of train": (
        lambda: jaxrl_dist.train("ppo", env="CartPole-v1"),  # type: ignore[arg-type]
        "not ('ppo', {'env': 'CartPole-v1'})",
    ),
    "a named policy of PPO": (
        lambda: PPO(policy="MlpPolicy", env=None),  # type: ignore[call-arg]
        "PPO has no field 'policy'; its fields are hyperparameters, and training is `for report in jaxrl_dist.train(",
    ),
    "an env of TD3": (
        lambda: TD3(env=None),  # type: ignore[call-arg]
        "TD3 has no field 'env'; its fields are hyperparameters, and training is `for report in jaxrl_dist.train("
        "jaxrl_dist.Train('td3', env='Pendulum-v1'",
    ),
    "a gymnasium.Env of Train": (
        lambda: jaxrl_dist.Train("ppo", env=gymnasium.make("CartPole-v1")),
        "not a TimeLimit; to train on a gymnasium.Env, pass a function of a module or notebook that makes it",
    ),
    "a gymnasium.Env": (
        lambda: jaxrl_dist.preset("ppo", gymnasium.make("CartPole-v1")),
        "not a TimeLimit; to train on a gymnasium.Env, pass a function of a module or notebook that makes it",
    ),
    "a function": (
        lambda: jaxrl_dist.preset("ppo", lambda: 3),
        "which no module has by name, returns a int; to train on a gym",
    ),
    "no run": (
        lambda: jaxrl_dist.load_policy("nothing"),
        "nothing is not a run directory: it does not exist",
    ),
    "no run to resume": (
        lambda: jaxrl_dist.resume("nothing"),
        "nothing is not a run directory: it does not exist",
    ),
    "a plan": (
        lambda: preset(plan="ondevice"),
        "plan must be one of on_device, synchronous, asynchronous, own_pace, gradients",
    ),
    "devices": (
        lambda: jaxrl_dist.train(preset(num_envs=12)),
        "num_envs 12 does not divide over 8 devices",
    ),
    "threads": (
        lambda: jaxrl_dist.train(preset(lockstep=True)),
        "lockstep does nothing without plan asynchronous, own_pace or gradients",
    ),
}


@pytest.mark.parametrize("what", IN_PYTHON)
def test_in_python_fields_are_named_not_flags(what: str) -> None:
    call, message = IN_PYTHON[what]
    with pytest.raises(ConfigError) as error:
        call()
    assert (
        message in str(error.value)
        and "--" not in str(error.value)
        and "\n" not in str(error.value)
    )


def test_integral_floats_are_taken() -> None:
    assert preset(total_env_steps=1e6).total_env_steps == 1_000_000


def test_messages_say_flags_or_fields_and_leave_commands_alone() -> None:
    text = "--num-envs 3 with --no-double: use --plan synchronous; see: jaxrl-dist --help; `pip install --pre x`"
    for message in (ConfigError(text), ConfigWarning(text)):
        assert message.with_flags == text
        assert str(message) == (
            "num_envs 3 with double=False: use plan synchronous; see: jaxrl-dist --help; `pip install --pre x`"
        )
    assert str(ConfigError()) == ""


def test_owners_of_a_field() -> None:
    assert (
        having("gae_lambda") == "ppo, a2c, appo, alphazero and a3c have" and having("nothing") == ""
    )
    assert having("q_lambda") == "pqn has" and "apex" in having("ez_greedy")


def test_what_users_of_stable_baselines_type_is_one_line_away() -> None:
    with pytest.raises(
        ImportError, match=r"no attribute 'PPO'; training is `for report in .*Train.'ppo',"
    ):
        jaxrl_dist.PPO("MlpPolicy", "CartPole-v1")
    with pytest.raises(
        ImportError, match=r"no attribute 'SAC'; training is `for report in .*Train.'sac',"
    ):
        from jaxrl_dist import SAC  # noqa: F401
    with pytest.raises(
        ImportError,
        match=r"it is jaxrl_dist.algorithms.ppo.PPO; jaxrl_dist.preset\('ppo', env\) has",
    ):
        from jaxrl_dist.algorithms import PPO as Class  # noqa: F401
    with pytest.raises(
        ImportError,
        match=r"it is jaxrl_dist.algorithms.r2d2.R2D2; jaxrl_dist.preset\('r2d2', env",
    ):
        algorithms.R2D2  # noqa: B018
    with pytest.raises(
        AttributeError, match=r"^module 'jaxrl_dist.algorithms' has no attribute 'nothing'$"
    ):
        algorithms.nothing  # noqa: B018
    with pytest.raises(
        ImportError, match=r"no attribute 'evaluate_policy'; policy.evaluate\(episodes=100\)"
    ):
        jaxrl_dist.evaluate_policy(None, None)
    with pytest.raises(
        AttributeError, match=r"^PPO has no attribute 'learn'; training is `for report .*run_dir="
    ):
        PPO().learn(1000)  # type: ignore[attr-defined]
    with pytest.raises(
        ImportError, match=r"no attribute 'TD3'; training is `for report in .*env='Pendulum-v1'"
    ):
        jaxrl_dist.TD3  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(
        AttributeError, match=r"jaxrl_dist.Train has no attribute 'learn'; training is `for report"
    ):
        jaxrl_dist.Train("ppo", env="CartPole-v1").learn(100)
    with pytest.raises(
        AttributeError, match=r"no attribute 'predict'; policy\(obs\)\[0\] of policy"
    ):
        object.__new__(jaxrl_dist.Policy).predict(None)
    with pytest.raises(
        AttributeError,
        match=r"^PPO has no attribute 'load'; jaxrl_dist.load_policy\(run_dir\) loads",
    ):
        PPO.load("runs/mine")  # type: ignore[attr-defined]
    with pytest.raises(
        ImportError,
        match=r"no attribute 'DummyVecEnv'; training makes its environments itself: ",
    ):
        jaxrl_dist.DummyVecEnv([])
    with pytest.raises(
        ImportError,
        match=r"no attribute 'EvalCallback'; a callback is .* evaluation_interval=10_000",
    ):
        from jaxrl_dist import EvalCallback  # noqa: F401
    with pytest.raises(
        TypeError,
        match=r"^this policy has no argument 'deterministic'; policy\(obs\) takes the best",
    ):
        object.__new__(jaxrl_dist.Policy)(None, deterministic=True)
    with pytest.raises(TypeError, match=r"^this policy has no argument 'nothing'$"):
        object.__new__(jaxrl_dist.Policy)(None, nothing=1)
    with pytest.raises(
        ImportError, match=r"no attribute 'evaluate'; policy.evaluate\(episodes=100\) of"
    ):
        jaxrl_dist.evaluate("runs/mine")
    with pytest.raises(ImportError, match=r"no attribute 'plot'; it is plot\(\['runs/mine'\], "):
        jaxrl_dist.plot("runs/mine")
    with pytest.raises(
        ImportError, match=r"no attribute 'make'; training makes its environments itself: "
    ):
        jaxrl_dist.make("CartPole-v1")
    with pytest.raises(
        ImportError, match=r"no attribute 'callbacks'; a callback is the body of `for report in"
    ):
        from jaxrl_dist import callbacks  # noqa: F401
    with pytest.raises(
        ImportError, match=r"no attribute 'MlpPolicy'; fields .* hidden_sizes=\(64, 64\)\)$"
    ):
        from jaxrl_dist import MlpPolicy  # noqa: F401
    with pytest.raises(AttributeError, match=r"^module 'jaxrl_dist' has no attribute 'nothing'$"):
        jaxrl_dist.nothing()


@pytest.mark.parametrize(
    "algorithm, message",
    [
        ("PPO", r"^unknown algorithm 'PPO' \(did you mean 'ppo'\?\)"),
        ("CartPole-v1", "^unknown algorithm 'CartPole-v1'"),
        (3, r"^algorithm must be a name or a config such as PPO\(\), not 3$"),
        (object, "^algorithm must be a name or a config"),
        (None, "^algorithm must be a name or a config"),
    ],
)
def test_a_config_refuses_a_wrong_algorithm_at_once(algorithm: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        jaxrl_dist.Train(algorithm, env="CartPole-v1")
