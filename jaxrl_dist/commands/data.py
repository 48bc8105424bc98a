"""``jaxrl-dist data``: shows what is in data sets, joins them, and takes their best episodes."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from jaxrl_dist.checks import MAX_RETURN
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
    """Share of the episodes to take, with the highest returns: 0.1 takes the best tenth."""
    random: float | None = setting(None, low=-MAX_RETURN, high=MAX_RETURN)
    """Mean return of random actions, to store in the data set; it is 0 in normalised scores."""
    expert: float | None = setting(None, low=-MAX_RETURN, high=MAX_RETURN)
    """Mean return of an expert, to store in the data set; it is 100 in normalised scores."""


def run(args: Sequence[str]) -> int:
    """Runs ``data DIR ... [-o DIR|FILE] [FLAGS]``."""
    options = flags.parse(Data, args, "jaxrl-dist data")
    if not options.data:
        raise ConfigError("which data set? Name its directory, as in: jaxrl-dist data data/NAME")

    from jaxrl_dist.data import files
    from jaxrl_dist.data.dataset import Dataset

    data = Dataset.joined([_load(name) for name in options.data])
    if options.best is not None:
        data = data.best(options.best)
    ends = {end: getattr(options, end) for end in files.ENDS if getattr(options, end) is not None}
    data = _with_ends(data, ends)
    picture = options.out is not None and _names_picture(options.out)
    if ends and (options.out is None or picture):
        _store_ends(options, ends)
    lines = [data.summary()]
    if options.out is not None:
        lines.append(f"wrote {_write(data, options.out, picture=picture)}")
    print(visible("\n".join(lines)))
    return 0


def _load(name: str) -> Dataset:
    from jaxrl_dist.data import formats
    from jaxrl_dist.data.dataset import Dataset

    prefix = formats.prefix_of(name)
    if prefix is None:
        return Dataset.load(name)
    return Dataset.from_episodes(**formats.FORMATS[prefix].read(name.removeprefix(prefix)))


def _with_ends(data: Dataset, ends: Mapping[str, float]) -> Dataset:
    about = {**data.about, **ends}
    if ends and about.get("random") == about.get("expert"):
        raise ConfigError(f"--random and --expert are both {about['random']:g}; they must differ")
    return dataclasses.replace(data, about=about)


def _store_ends(options: Data, ends: Mapping[str, float]) -> None:
    """Stores the mean returns of a random and an expert policy in a directory."""
    from jaxrl_dist.data import files, formats

    name = options.data[0]
    if len(options.data) > 1 or options.best is not None or formats.prefix_of(name) is not None:
        raise ConfigError(
            "--random and --expert change one data set in place, and not one of Minari; name one "
            "data set, or write a new one with -o"
        )
    files.describe(pathlib.Path(name), ends)


def _names_picture(out: str) -> bool:
    from jaxrl_dist.data import formats

    if not pathlib.Path(out).suffix or formats.prefix_of(out) is not None:
        return False

    from jaxrl_dist.commands.plot import drawing

    return drawing.names_picture(out)


def _write(data: Dataset, out: str, *, picture: bool) -> str:
    """Writes a data set, or a picture of its returns; returns the name of what it has written."""
    from jaxrl_dist.data import formats

    if picture:
        from jaxrl_dist.commands.plot import drawing

        histogram = drawing.histogram(data.returns, "episode return", "episodes")
        drawing.save(histogram, pathlib.Path(out))
        return out
    prefix = formats.prefix_of(out)
    if prefix is None:
        return str(data.save(out))
    form = formats.FORMATS[prefix]
    form.write(out.removeprefix(prefix), data.as_episodes(), data.interface, data.about)
    return out
