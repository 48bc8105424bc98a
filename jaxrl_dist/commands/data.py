"""``jaxrl-dist data``: shows what is in data sets, joins them, and takes their best episodes."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from jaxrl_dist.checks import MAX_RETURN, MINARI
from jaxrl_dist.commands import flags, help
from jaxrl_dist.config.values import setting
from jaxrl_dist.errors import ConfigError, visible

if TYPE_CHECKING:
    from jaxrl_dist.data.dataset import Dataset


@dataclasses.dataclass(frozen=True)
class Data:
    """Shows what is in a data set; with -o, joins several, or takes their best episodes."""

    data: Annotated[tuple[str, ...], help.Argument("DIR")] = ()
    """Directories of data sets; minari:NAME is one of Minari."""
    out: Annotated[str | None, help.Alias("-o")] = None
    """Directory to make for the joined data set, minari:NAME for one of Minari, or picture, such as
    returns.png, for a histogram of the returns."""
    best: float | None = setting(None, above=0, high=1)
    """Share of the episodes to take, those with the highest returns: 0.1 takes a tenth."""
    random: float | None = setting(None, low=-MAX_RETURN, high=MAX_RETURN)
    """Mean return of random actions, which is 0 in the
    normalised scores of what learns from the data; to store."""
    expert: float | None = setting(None, low=-MAX_RETURN, high=MAX_RETURN)
    """Mean return of an expert, which is 100 in normalised scores; to store."""


def run(args: Sequence[str]) -> int:
    """Runs ``data DIR ... [-o DIR|FILE] [FLAGS]``."""
    options = flags.parse(Data, args, "jaxrl-dist data")
    if not options.data:
        raise ConfigError("which data set? Name its directory, as in: jaxrl-dist data data/NAME")

    from jaxrl_dist.data import files
    from jaxrl_dist.data.dataset import Dataset

    data = Dataset.joined([_load(path) for path in options.data])
    if options.best is not None:
        data = data.best(options.best)
    ends = {end: value for end in files.ENDS if (value := getattr(options, end)) is not None}
    data = dataclasses.replace(data, about={**data.about, **ends})
    if ends and data.about.get("random") == data.about.get("expert"):
        raise ConfigError(
            f"the returns of random actions and of the expert are both {data.about['random']:g}"
        )
    picture = _names_picture(options.out or "")
    makes = options.out is not None and not picture
    if ends and not makes:
        if len(options.data) > 1 or options.best is not None or options.data[0].startswith(MINARI):
            raise ConfigError(
                "--random and --expert change one data set in place, none of Minari: name one alone, or -o a new one"
            )
        files.describe(pathlib.Path(options.data[0]), ends)
    if options.out is None:
        wrote = ""
    else:
        wrote = f"\nwrote {_write(data, options.out, picture=picture)}"
    print(visible(f"{data.summary()}{wrote}"))
    return 0


def _load(path: str) -> Dataset:
    from jaxrl_dist.data.dataset import Dataset

    if path.startswith(MINARI):
        return Dataset.from_minari(path.removeprefix(MINARI))
    return Dataset.load(path)


def _names_picture(out: str) -> bool:
    if not pathlib.Path(out).suffix or out.startswith(MINARI):
        return False

    from jaxrl_dist.commands.plot import drawing

    return drawing.names_picture(out)


def _write(data: Dataset, out: str, *, picture: bool) -> str:
    """Writes a data set, or a picture of its returns; returns the name of what it has written."""
    if picture:
        from jaxrl_dist.commands.plot import drawing

        drawing.save(
            drawing.histogram(data.returns, "episode return", "episodes"), pathlib.Path(out)
        )
    elif out.startswith(MINARI):
        data.to_minari(out.removeprefix(MINARI))
    else:
        return str(data.save(out))
    return out
