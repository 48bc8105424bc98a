"""``jaxrl-dist evaluate``: plays episodes with a trained policy."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from jaxrl_dist.algorithms import from_file
from jaxrl_dist.checks import counted, unit
from jaxrl_dist.commands import find_modules, flags, help
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError, say, visible
from jaxrl_dist.hosts import stdout
from jaxrl_dist.run.files import MEMBERS, members_of
from jaxrl_dist.run.storage import check_run_dir
from jaxrl_dist.settings.policies import Policies
from jaxrl_dist.settings.stored import stored_fields

if TYPE_CHECKING:
    from jaxrl_dist.actors.evaluate import Evaluator
    from jaxrl_dist.play.policy import Policy


@dataclasses.dataclass(frozen=True)
class Trained:
    """The trained policy of a finished or unfinished run."""

    run_dir: Annotated[str, help.Argument("RUN_DIR")] = ""
    """Directory of the run, such as runs/NAME."""
    env: str | None = None
    """Environment instead of the run's; required again if it has the form my_module:make."""
    algorithm: str | None = None
    """File of the algorithm, if the run trained your own."""
    checkpoint: str | None = None
    """Checkpoint whose policy to take: "best" (the highest return, as the run's --keep-best says)
    or its env steps; None: the trained policy, or else that of the newest checkpoint."""

    def taken(self, run_dir: str | pathlib.Path) -> dict[str, int]:
        """Returns the ``checkpoint`` that ``load`` takes of a run, by its env steps;
        {} where none is named.

        Raises:
          ConfigError: the run does not have it.
        """
        from jaxrl_dist.run.checkpoint import chosen, number_of

        if self.checkpoint is None:
            return {}
        return {"checkpoint": number_of(chosen(pathlib.Path(run_dir), self.checkpoint))}

    def load(
        self,
        policy: str | None = None,
        env_options: dict[str, str] | None = None,
        num_simulations: int | None = None,
    ) -> Policy:
        """Loads the policy; ``policy`` names one of several.

        Raises:
          ConfigError: the directory holds no run, or no policy,
            or ``algorithm`` has nothing to do with it.
        """
        kind = from_file(self.algorithm) if self.algorithm else None
        check_run_dir(pathlib.Path(self.run_dir))
        # fails before JAX is imported
        trained, _ = stored_fields(pathlib.Path(self.run_dir), kind, self.env)
        if kind is not None and trained not in (Policies.stored_as, kind.__name__):
            raise ConfigError(
                f"{self.run_dir} is a run of {trained}, not of {kind.__name__}: remove --algorithm"
            )
        find_modules(self.env)

        from jaxrl_dist.play.policy import load_policy

        options = env_options or None
        which: dict[str, Any] = {
            "policy": policy,
            "checkpoint": self.checkpoint,
            "num_simulations": num_simulations,
        }
        return load_policy(self.run_dir, kind, env=self.env, env_options=options, **which)


@dataclasses.dataclass(frozen=True)
class Evaluate(Trained):
    """Plays episodes with the policy of a finished or unfinished run,
    or of each member of a population.
    """

    episodes: int = setting(100, low=1, high=10**6)
    """Number of episodes to play, each of one agent: 100 of two players are 50 games."""
    seed: int = setting(0, low=0, high=2**31 - 1)
    """Seed of the environments."""
    env_options: dict[str, str] = dataclasses.field(default_factory=dict)
    """Options of the environment instead of the run's."""
    evaluation_policy: Literal["greedy", "sampled"] | None = None
    """Take the best actions or sample them; None: as the run's evaluations did."""
    max_steps: int | None = setting(None, low=1, high=10**9)
    """Env steps after which an episode is cut; None: 27,000,
    or the environment's own limit if longer."""
    num_simulations: int | None = setting(None, low=0, high=10**4)
    """Steps of each search of an algorithm that plans; 0: the network acts alone; None:
    as in training."""
    quiet: bool = False
    """Show no progress."""
    json: bool = False
    """Print JSON, and no progress."""

    @property
    def sampled(self) -> bool | None:
        """Returns ``evaluation_policy`` as ``Policy.evaluate`` takes it."""
        if self.evaluation_policy is None:
            return None
        return self.evaluation_policy == "sampled"


def run(args: Sequence[str]) -> int:
    """Runs ``evaluate RUN_DIR [FLAGS]``; of a population, all members play."""
    options = flags.parse(Evaluate, args, "jaxrl-dist evaluate")
    if not options.run_dir:
        raise ConfigError("which run? Name its directory, as in: jaxrl-dist evaluate runs/NAME")
    members = members_of(pathlib.Path(options.run_dir))
    with stdout.kept_for(options.json):
        if members:
            text = _of_members(options, members)
        else:
            text = _of_run(options)
    print(text if options.json else visible(text))
    return 0


def _of_run(options: Evaluate) -> str:
    """Evaluates a run; returns a line or JSON."""
    policy = options.load(env_options=options.env_options, num_simulations=options.num_simulations)

    from jaxrl_dist.data.files import scored
    from jaxrl_dist.run.checkpoint import trained
    from jaxrl_dist.run.console import Display, played

    finished = trained(options.run_dir)
    config = policy.config
    if not finished and options.checkpoint is None:
        text = f"{options.run_dir} has not finished its {config.total:,} {unit(config.clock)}"
        say(f"warning: {text}: this is the policy of its newest checkpoint")

    display = Display(options.episodes, quiet=options.quiet or options.json)
    show = display.evaluating
    with display.live:
        result = policy.evaluate(
            options.episodes,
            options.seed,
            max_steps=options.max_steps,
            sampled=options.sampled,
            progress=show,
        )
    numbers = scored(result.summary(), policy.config.data)
    taken = options.taken(options.run_dir)
    shown = ", ".join(f"{name} {steps:,}" for name, steps in taken.items())
    if options.json:
        return json.dumps({"finished": finished, **taken, **numbers}, indent=2)
    return played(numbers, shown)


def _of_members(options: Evaluate, members: Sequence[pathlib.Path]) -> str:
    """Evaluates a population; returns a table with a row for each member,
    and what holds for all of them, or JSON.

    Raises:
      ConfigError: no member has a policy that can be loaded.
    """
    from jaxrl_dist.data.files import scored
    from jaxrl_dist.run.console import played
    from jaxrl_dist.settings.members import results_of
    from jaxrl_dist.training.joining import join_evaluations

    if not (options.quiet or options.json):
        print(
            f"evaluating {counted(len(members), 'member')}: {counted(options.episodes, 'episode')} each",
            flush=True,
        )
    evaluators: list[tuple[object, Evaluator]] = []  # of members that differ in seeds only, one
    evaluations = dict[str, Mapping[str, float | int]]()
    problems = list[ConfigError]()
    for member in members:
        try:
            of_member = dataclasses.replace(options, run_dir=str(member))
            policy = of_member.load(
                env_options=options.env_options, num_simulations=options.num_simulations
            )
        except ConfigError as error:
            problems.append(error)
            continue
        acting = dataclasses.replace(policy.config, seed=0, run_dir=None)
        evaluator = next((x for config, x in evaluators if config == acting), None)
        if evaluator is None:
            num_envs = policy.config.num_envs or 1  # the preset has it
            evaluator = policy.evaluator(
                options.episodes, options.seed, options.max_steps, options.sampled, num_envs
            )
            evaluators.append((acting, evaluator))
        evaluation = evaluator.play(policy.source.spec.keyed(policy.variables))
        assert evaluation is not None, "nothing stops it"
        evaluations[member.name] = scored(evaluation.summary(), policy.config.data)
    if not evaluations:
        raise problems[0]
    statuses = {
        name: row["status"] for name, row in results_of(pathlib.Path(options.run_dir)).items()
    }
    left = [name for name in evaluations if statuses.get(name) == "training"]
    if options.checkpoint is None and left:
        say(
            f"warning: these members have not finished, and play as of their newest checkpoints: {', '.join(left)}"
        )
    together = join_evaluations(list(evaluations.values()))
    if options.json:
        for problem in problems:
            say(f"warning: {problem.with_flags}")
        known = {
            x.name: {**options.taken(x), **evaluations[x.name]}
            for x in members
            if x.name in evaluations
        }
        by_member = {x.name: known.get(x.name) for x in members}
        return json.dumps({"finished": not left, **together, "by_member": by_member}, indent=2)
    text = _table(options, evaluations)
    return "\n".join([text, *map(str, problems), played(together)])


def _table(options: Trained, evaluations: Mapping[str, Mapping[str, float | int]]) -> str:
    """Returns a table with a row for each member."""
    from jaxrl_dist.settings.members import results_of
    from jaxrl_dist.training.tables import aligned

    run_dir = pathlib.Path(options.run_dir)
    results = results_of(run_dir)
    lines = list[dict[str, str]]()
    for name, numbers in evaluations.items():
        known = results.get(name, {"member": name})
        lines.append(
            {
                field: known[field]
                for field in itertools.takewhile(lambda field: field != "status", known)
            }
        )
        lines[-1] |= {
            title: f"{steps:,}" for title, steps in options.taken(run_dir / MEMBERS / name).items()
        }
        lines[-1] |= _columns(numbers)
    head = list(dict.fromkeys(itertools.chain(*lines)))
    return aligned([head, *([line.get(title, "-") for title in head] for line in lines)])


def _columns(evaluation: Mapping[str, float | int]) -> dict[str, str]:
    """Returns a member's numbers by the titles of their columns: of each policy,
    if there are several.
    """
    from jaxrl_dist.run.console import of_each_policy

    whole, *policies = of_each_policy(evaluation).items()
    columns = {"episodes": str(evaluation["episodes"])}
    for policy, numbers in policies or [whole]:
        kind = "sampled" if numbers.get("sampled") else "greedy"
        if numbers["episodes"]:
            columns[f"{policy} {kind} return, mean".lstrip()] = f"{numbers['return_mean']:.4g}"
        if numbers["episodes"] > 1:
            columns[f"{policy} std over episodes".lstrip()] = f"{numbers['return_std']:.4g}"
        columns |= {
            f"{policy} {x}".lstrip(): f"{y:.4g}"
            for x, y in numbers.items()
            if x.startswith("info/")
        }
    return columns
