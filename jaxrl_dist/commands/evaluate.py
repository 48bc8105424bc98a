"""``jaxrl-dist evaluate``: plays episodes with a trained policy."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from jaxrl_dist.algorithms import from_file
from jaxrl_dist.checks import counted, unit
from jaxrl_dist.commands import find_modules, flags, help
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError, ConfigWarning, say, visible
from jaxrl_dist.hosts import stdout
from jaxrl_dist.run.files import members_of
from jaxrl_dist.run.storage import check_run_dir
from jaxrl_dist.settings.policies import Policies
from jaxrl_dist.settings.stored import changed_code, stored_fields

if TYPE_CHECKING:
    from jaxrl_dist.actors.evaluate import Evaluator
    from jaxrl_dist.config.train import Train
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
    or its env steps; None: the trained policy, or else the newest checkpoint's."""

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
        own_algorithm = from_file(self.algorithm) if self.algorithm else None
        run_dir = pathlib.Path(self.run_dir)
        check_run_dir(run_dir)
        # fails before JAX is imported
        trained, _ = stored_fields(run_dir, own_algorithm, self.env)
        if own_algorithm and trained not in (Policies.stored_as, own_algorithm.__name__):
            raise ConfigError(
                f"{self.run_dir} is a run of {trained}, not of {own_algorithm.__name__}; "
                "remove --algorithm"
            )
        if own_algorithm is not None:
            warn_of_code(run_dir, own_algorithm)
        find_modules(self.env)

        from jaxrl_dist.play.policy import load_policy

        return load_policy(
            self.run_dir,
            own_algorithm,
            env=self.env,
            env_options=env_options or None,
            policy=policy,
            checkpoint=self.checkpoint,
            num_simulations=num_simulations,
        )


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
    """Steps of each search of an algorithm that plans; 0: the network acts alone;
    None: as in training."""
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

    def load_player(self) -> Policy:
        """Loads the policy for these ``env_options`` and ``num_simulations``."""
        return self.load(env_options=self.env_options, num_simulations=self.num_simulations)


class RunEvaluation(NamedTuple):
    """The evaluation of a policy, and the checkpoint that holds the policy."""

    numbers: Mapping[str, float | int]
    """Its summary, and the normalised score if the run's data set gives one."""
    checkpoint: int | None
    """Env steps of the checkpoint that the user named; None: none was named."""

    def fields(self) -> dict[str, float | int]:
        """Returns the fields of the JSON."""
        if self.checkpoint is None:
            return dict(self.numbers)
        return {"checkpoint": self.checkpoint, **self.numbers}

    def text(self) -> str:
        """Returns one line, or one for each of several policies."""
        from jaxrl_dist.run.console import evaluation_lines

        if self.checkpoint is None:
            return evaluation_lines(self.numbers)
        return evaluation_lines(self.numbers, f"checkpoint {self.checkpoint:,}")


def warn_of_code(run_dir: pathlib.Path, own_algorithm: type) -> None:
    """Warns that the user's algorithm file has other code than the run has trained with."""
    if problem := changed_code(run_dir, own_algorithm):
        warnings.warn(f"{problem} if it decides how the policy acts", ConfigWarning, stacklevel=3)


def named_checkpoint(options: Trained) -> int | None:
    """Returns the env steps of the checkpoint that the user named; None: none was named.

    Raises:
      ConfigError: the run does not have it.
    """
    from jaxrl_dist.run.checkpoint import chosen, number_of

    if options.checkpoint is None:
        return None
    return number_of(chosen(pathlib.Path(options.run_dir), options.checkpoint))


def run(args: Sequence[str]) -> int:
    """Runs ``evaluate RUN_DIR [FLAGS]``; all members of a population play."""
    options = flags.parse(Evaluate, args, "jaxrl-dist evaluate")
    if not options.run_dir:
        raise ConfigError("which run? Name its directory, as in: jaxrl-dist evaluate runs/NAME")
    members = members_of(pathlib.Path(options.run_dir))
    with stdout.kept_for(options.json):
        if members:
            output = evaluate_members(options, members)
        else:
            output = evaluate_run(options)
    print(output if options.json else visible(output))
    return 0


# --- One run --------------------------------------------------------------------------------------


def evaluate_run(options: Evaluate) -> str:
    """Evaluates a run; returns one line, or one for each of several policies, or JSON."""
    policy = options.load_player()
    checkpoint = named_checkpoint(options)

    from jaxrl_dist.data.files import scored
    from jaxrl_dist.run.checkpoint import trained
    from jaxrl_dist.run.console import Display

    finished = trained(options.run_dir)
    if not finished and options.checkpoint is None:
        config = policy.config
        say(
            f"warning: {options.run_dir} has not finished its {config.total:,} "
            f"{unit(config.clock)}; this is the policy of its newest checkpoint"
        )
    display = Display(options.episodes, quiet=options.quiet or options.json)
    with display.live:
        episodes = policy.evaluate(
            options.episodes,
            options.seed,
            max_steps=options.max_steps,
            sampled=options.sampled,
            progress=display.evaluating,
        )
    evaluation = RunEvaluation(scored(episodes.summary(), policy.config.data), checkpoint)
    if options.json:
        return json.dumps({"finished": finished, **evaluation.fields()}, indent=2)
    return evaluation.text()


# --- The members of a population ------------------------------------------------------------------


def evaluate_members(options: Evaluate, members: Sequence[pathlib.Path]) -> str:
    """Evaluates a population; returns a table with a row for each member, and a line about the
    episodes of all of them, or JSON.

    Raises:
      ConfigError: no member has a policy that can be loaded.
    """
    by_member, problems = _play_members(options, members)
    if not by_member:
        raise problems[0]

    from jaxrl_dist.settings.members import results_of

    results = results_of(pathlib.Path(options.run_dir))
    unfinished = [name for name in by_member if results.get(name, {}).get("status") == "training"]
    if unfinished and options.checkpoint is None:
        say(
            "warning: these members have not finished, so the policies of their newest "
            f"checkpoints play: {', '.join(unfinished)}"
        )
    if options.json:
        for problem in problems:
            say(f"warning: {problem.with_flags}")
        names = [member.name for member in members]
        return _members_json(names, by_member, finished=not unfinished)
    return _members_text(by_member, results, problems)


def _members_json(
    names: Sequence[str], by_member: Mapping[str, RunEvaluation], *, finished: bool
) -> str:
    """Returns the JSON of a population; members without an evaluation are null."""
    evaluations: dict[str, dict[str, float | int] | None] = dict.fromkeys(names)
    for name, evaluation in by_member.items():
        evaluations[name] = evaluation.fields()
    total = _joined(by_member)
    return json.dumps({"finished": finished, **total, "by_member": evaluations}, indent=2)


def _members_text(
    by_member: Mapping[str, RunEvaluation],
    results: Mapping[str, Mapping[str, str]],
    problems: Sequence[ConfigError],
) -> str:
    """Returns the table of a population, its problems, and the line about all episodes."""
    from jaxrl_dist.run.console import evaluation_lines

    lines = [_table(by_member, results), *map(str, problems), evaluation_lines(_joined(by_member))]
    return "\n".join(lines)


def _joined(by_member: Mapping[str, RunEvaluation]) -> Mapping[str, float | int]:
    """Returns the numbers of the episodes of all members."""
    from jaxrl_dist.training.joining import join_evaluations

    return join_evaluations([evaluation.numbers for evaluation in by_member.values()])


def _play_members(
    options: Evaluate, members: Sequence[pathlib.Path]
) -> tuple[dict[str, RunEvaluation], list[ConfigError]]:
    """Plays the episodes of each member.

    Returns:
      The evaluations by member, and why the policies of other members cannot be loaded.
    """
    from jaxrl_dist.data.files import scored

    if not (options.quiet or options.json):
        print(
            f"evaluating {counted(len(members), 'member')}: "
            f"{counted(options.episodes, 'episode')} each",
            flush=True,
        )
    by_member = dict[str, RunEvaluation]()
    problems = list[ConfigError]()
    evaluators: list[tuple[Train, Evaluator]] = []
    for member in members:
        member_options = dataclasses.replace(options, run_dir=str(member))
        try:
            with warnings.catch_warnings():
                if by_member:  # the first one has warned of what all have in common
                    warnings.simplefilter("ignore", ConfigWarning)
                policy = member_options.load_player()
            checkpoint = named_checkpoint(member_options)
        except ConfigError as error:
            problems.append(error)
            continue
        evaluator = _shared_evaluator(options, policy, evaluators)
        episodes = evaluator.play(policy.source.spec.keyed(policy.variables))
        assert episodes is not None, "nothing stops it"
        numbers = scored(episodes.summary(), policy.config.data)
        by_member[member.name] = RunEvaluation(numbers, checkpoint)
    return by_member, problems


def _shared_evaluator(
    options: Evaluate, policy: Policy, evaluators: list[tuple[Train, Evaluator]]
) -> Evaluator:
    """Returns the evaluator of a policy, and adds it to ``evaluators`` if it is new.

    Members that differ only in their seeds share one, so their programs are compiled once.
    """
    config = dataclasses.replace(policy.config, seed=0, run_dir=None)
    for other, evaluator in evaluators:
        if other == config:
            return evaluator
    assert config.num_envs is not None, "the preset has it"
    evaluator = policy.evaluator(
        options.episodes, options.seed, options.max_steps, options.sampled, config.num_envs
    )
    evaluators.append((config, evaluator))
    return evaluator


def _table(by_member: Mapping[str, RunEvaluation], results: Mapping[str, Mapping[str, str]]) -> str:
    """Returns a table with a row for each member.

    Args:
      results: rows of the population's ``results.csv``, by member.
    """
    from jaxrl_dist.training.tables import aligned

    rows = []
    for name, evaluation in by_member.items():
        row = _before_status(results.get(name, {"member": name}))
        if evaluation.checkpoint is not None:
            row["checkpoint"] = f"{evaluation.checkpoint:,}"
        rows.append(row | _columns(evaluation.numbers))
    titles = list(dict.fromkeys(itertools.chain(*rows)))
    cells = [[row.get(title, "-") for title in titles] for row in rows]
    return aligned([titles, *cells])


def _before_status(result: Mapping[str, str]) -> dict[str, str]:
    """Returns the columns of ``results.csv`` that stand before the status: the member, its seed
    and its varied hyperparameters.
    """
    titles = itertools.takewhile(lambda title: title != "status", result)
    return {title: result[title] for title in titles}


def _columns(numbers: Mapping[str, float | int]) -> dict[str, str]:
    """Returns a member's numbers by the titles of their columns; each of several policies has
    columns of its own.
    """
    from jaxrl_dist.run.console import of_each_policy

    whole, *policies = of_each_policy(numbers).items()
    columns = {"episodes": str(numbers["episodes"])}
    for policy, own in policies or [whole]:
        prefix = f"{policy} " if policy else ""
        kind = "sampled" if own.get("sampled") else "greedy"
        if own["episodes"]:
            columns[f"{prefix}{kind} return, mean"] = f"{own['return_mean']:.4g}"
        if own["episodes"] > 1:
            columns[f"{prefix}std over episodes"] = f"{own['return_std']:.4g}"
        for name, value in own.items():
            if name.startswith("info/"):
                columns[f"{prefix}{name}"] = f"{value:.4g}"
    return columns
