"""Data sets of Minari: https://minari.farama.org.

Anyone may have written their files, and the metadata name code that makes an environment.
None of it is run.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_dist import spaces
from jaxrl_dist.checks import install_extra
from jaxrl_dist.envs.conversion import KINDS
from jaxrl_dist.envs.native import plain
from jaxrl_dist.errors import ConfigError, first_line
from jaxrl_dist.run import directories, machine, storage
from jaxrl_dist.run.storage import Json
from jaxrl_dist.spaces import Box, Discrete, Interface, MultiDiscrete, Space
from jaxrl_dist.types import PyTree

OURS = "jaxrl_dist"
"""Key of ``Dataset.about`` in the metadata of data sets that we have made."""
INTERFACE = "jaxrl_dist_interface"
"""Key of what Minari's spaces do not say."""
LOG_PROB = "log_prob"
"""Key of log-probabilities in the ``infos`` of an episode of ours, which has one entry more than
steps. The infos of others are not read: their first entry may be that of the reset, or a name may
mean something else."""

_UNPACKED = 1100
"""Bytes of arrays that a byte of their file may announce: gzip packs zeros 1,032 to 1, and nothing
tighter."""
_HDF5_BYTES = 4096  # of a file for each array of an episode, beside its values; 2,900 were measured


def read(source: Any) -> dict[str, Any]:
    """Returns a data set as arguments of ``Dataset.from_episodes``.

    Args:
      source: a ``minari.MinariDataset``, or the name of one on this machine.

    Raises:
      ConfigError: there is none, or it is damaged, or no policy supports its spaces.
    """
    with _failing(source):
        data = _loaded(source) if isinstance(source, str) else source
        _check_files(data.storage)
        metadata = data.storage.metadata
        label = f"minari:{data.spec.dataset_id}"
        _check_kinds(data.observation_space, label, "observations")
        _check_kinds(data.action_space, label, "actions")
        episodes = [
            _episode(episode, label, is_ours=OURS in metadata)
            for episode in data.iterate_episodes()
        ]
        interface = metadata.get(INTERFACE)
        if not isinstance(interface, dict):
            interface = {}
        mask = interface.get("mask")
        return {
            "episodes": episodes,
            "observation_space": data.observation_space,
            "action_space": data.action_space,
            "mask": mask if isinstance(mask, str) else None,
            "both_sides": interface.get("both_sides") is True,
            "about": _about(metadata, data.spec.dataset_id),
        }


def _episode(episode: Any, label: str, *, is_ours: bool) -> dict[str, PyTree]:
    """Returns a ``minari.EpisodeData`` as ``Dataset.from_episodes`` takes it."""
    if np.any(episode.terminations[:-1]) or np.any(episode.truncations[:-1]):
        raise ConfigError(
            f"episode {episode.id} of {label} ends before its last step; divide it there"
        )
    columns = {
        "obs": episode.observations,
        "action": episode.actions,
        "reward": episode.rewards,
        "terminated": bool(episode.terminations[-1]),
    }
    if is_ours and LOG_PROB in (episode.infos or {}):
        columns[LOG_PROB] = episode.infos[LOG_PROB][:-1]
    return columns


def _check_kinds(native: Any, label: str, role: str) -> None:
    space = plain(native)
    for name, part in (space.parts or {"": space}).items():
        if part.kind not in KINDS:
            raise ConfigError(
                f"{label} has {role} {name} of the kind {part.kind}, which no policy can read; "
                "make a copy without them, with minari.create_dataset_from_buffers"
            )


def _loaded(name: str) -> Any:
    import minari

    path = _place_of(name) / "data"
    if not path.is_dir():
        raise ConfigError(
            f"there is no Minari data set {name} here; `minari download {name}` fetches a "
            "published one"
        )
    metadata = storage.read_json(path / "metadata.json")
    if (
        not isinstance(metadata, dict)
        or not {"observation_space", "action_space"} <= metadata.keys()
    ):
        raise ConfigError(
            f"minari:{name} describes its spaces by code that makes an environment, and such code "
            "is not run"
        )
    return minari.MinariDataset(path)


def _check_files(stored: Any) -> None:
    """Checks that a data set holds all its values itself, and not more than its size and this
    machine's memory explain.

    HDF5 follows links, and reads the bytes of an array from any file that the array names.

    Args:
      stored: a ``minari.dataset.minari_storage.MinariStorage``.

    Raises:
      ConfigError: it does not, or it has another format than HDF5.
    """
    if stored.FORMAT != "hdf5":
        raise ConfigError(
            f"the format {stored.FORMAT} is not supported; Dataset.from_episodes takes its episodes"
        )
    folder = pathlib.Path(stored.data_path)
    for file in directories.plain_files(folder.parent.resolve() / folder.name):
        if file.suffix != ".hdf5":
            continue
        size = _announced(file)
        own = file.stat().st_size
        if size > min(_UNPACKED * own, machine.memory_size()):
            raise ConfigError(
                f"{file} announces {size:,} bytes, more than its {own:,} bytes or the memory here "
                "explain"
            )


def _announced(file: pathlib.Path) -> int:
    """Returns the bytes that all arrays of an HDF5 file have in memory.

    Raises:
      ConfigError: one of them lies in another file, or has two names.
    """
    import h5py

    links = dict[str, Any]()
    size = 0
    with h5py.File(file, "r") as content:
        content.visititems_links(links.__setitem__)  # which follows none
        addresses = {h5py.h5o.get_info(content.id).addr}
        for name, link in links.items():
            if isinstance(link, h5py.HardLink):
                entry = content[name]
            else:
                entry = None
            address = entry and h5py.h5o.get_info(entry.id).addr
            is_array = isinstance(entry, h5py.Dataset)
            if (
                entry is None
                or address in addresses
                or (is_array and (entry.external or entry.is_virtual))
            ):
                raise ConfigError(
                    f"{file}: {name} is a link, or lies in another file; copy its values into this one"
                )
            addresses.add(address)
            if is_array:
                size += math.prod(entry.shape or ()) * entry.id.get_type().get_size()
    return size


def _place_of(name: str) -> pathlib.Path:
    """Returns the directory of a data set.

    Raises:
      ConfigError: Minari does not take the name, which might lead elsewhere.
    """
    from minari.dataset.minari_dataset import DATASET_ID_RE
    from minari.storage.datasets_root_dir import get_dataset_path

    match = DATASET_ID_RE.fullmatch(name)
    if match is None or match["version"] is None:
        raise ConfigError(
            f"minari:{name} is not a name as Minari has them, such as minari:cartpole/medium-v0, "
            "with two letters or more before the /"
        )
    return pathlib.Path(get_dataset_path(name))


@contextlib.contextmanager
def _failing(source: object) -> Iterator[None]:
    """Turns the errors of Minari and of its libraries into a ``ConfigError``."""
    try:
        yield
    except ConfigError:
        raise
    except OSError as error:
        # not one that HDF5 has found in a file
        if error.errno is not None and error.filename is not None:
            raise
        raise ConfigError(f"{_label(source)} cannot be converted: {first_line(error)}") from None
    except ImportError:
        raise ConfigError(f"Minari is not installed: {install_extra('minari')}") from None
    except Exception as error:  # whatever a file makes them raise
        raise ConfigError(
            f"{_label(source)} cannot be converted: {type(error).__name__}: {first_line(error)}"
        ) from None


def _label(source: object) -> str:
    if isinstance(source, str):
        return source
    return "the Minari data set"


def _about(metadata: Mapping[str, Json], name: str) -> dict[str, Json]:
    """Returns ``Dataset.about``, from what we have stored or from Minari's own metadata."""
    ours = metadata.get(OURS)
    if isinstance(ours, dict):
        json.dumps(ours, allow_nan=False)  # so that a data set can hold it
        return ours
    behaviour = {"minari": name}
    if metadata.get("algorithm_name") is not None:
        behaviour["algorithm"] = str(metadata["algorithm_name"])
    about: dict[str, Json] = {"behaviour": behaviour}
    with contextlib.suppress(TypeError, ValueError, LookupError):
        about["env"] = str(json.loads(metadata["env_spec"])["id"])
    ends = {"random": metadata.get("ref_min_score"), "expert": metadata.get("ref_max_score")}
    return about | {end: value for end, value in ends.items() if value is not None}


def write(
    name: str,
    episodes: Sequence[Mapping[str, PyTree]],
    interface: Interface,
    about: Mapping[str, Json],
    **options: Any,
) -> Any:
    """Makes a data set on this machine, and returns it; values of ``episodes`` are as policies see
    them.

    Raises:
      ConfigError: it exists, or the name is not one.
      OSError: the disk is full; nothing is left of the data set.
    """
    with _failing(f"minari:{name}"), warnings.catch_warnings():
        import minari
        from minari.data_collector import EpisodeBuffer

        warnings.simplefilter("ignore")  # it recommends an author, a link to code, and more
        fields = [_buffer_fields(episode, interface) for episode in episodes]
        native = {f"{role}_space": _native(interface, role) for role in ("observation", "action")}
        metadata = {
            "ref_min_score": about.get("random"),
            "ref_max_score": about.get("expert"),
            OURS: dict(about),
            INTERFACE: {"mask": interface.mask or "", "both_sides": interface.both_sides},
        }
        with _whole(_place_of(name), jax.tree.leaves(fields)):
            data = minari.create_dataset_from_buffers(
                name,
                [EpisodeBuffer(**arrays) for arrays in fields],
                **native,
                jpeg_encoding=False,
                **options,
            )
            data.storage.update_metadata(
                {key: value for key, value in metadata.items() if value is not None}
            )
        return data


def _buffer_fields(episode: Mapping[str, PyTree], interface: Interface) -> dict[str, PyTree]:
    """Returns the fields of a ``minari.data_collector.EpisodeBuffer``, all of numpy arrays."""
    end = np.zeros(len(episode["reward"]), bool)
    end[-1] = True
    never = np.zeros_like(end)
    terminated = episode["terminated"]
    fields = {
        "observations": _valued(interface, "observation", episode["obs"]),
        "actions": _valued(interface, "action", episode["action"]),
        "rewards": episode["reward"],
        "terminations": end if terminated else never,
        "truncations": never if terminated else end,
    }
    if LOG_PROB in episode:
        fields["infos"] = {LOG_PROB: np.append(episode[LOG_PROB], np.float32(0))}
    return fields


@contextlib.contextmanager
def _whole(place: pathlib.Path, arrays: list[np.ndarray]) -> Iterator[None]:
    """Deletes what Minari has left in a new directory if the context ends with an error.

    Raises:
      ConfigError: the directory exists.
      OSError: the disk has no room for these arrays; HDF5 would end the process.
    """
    if os.path.lexists(place):
        raise ConfigError(f"the Minari data set {place} exists; choose another name or version")
    place.mkdir(parents=True)
    try:
        with storage.naming(place):
            size = sum(array.nbytes * 9 // 8 + _HDF5_BYTES for array in arrays)
            directories.check_room(place / "room", size)
            place.rmdir()  # Minari makes it
            yield
    except BaseException:
        directories.delete(place)
        raise


def _native(interface: Interface, role: str) -> Any:
    """Returns Gymnasium's space of the observations or actions of an environment."""
    from gymnasium import spaces as kinds

    def native(space: Space, path: str) -> Any:
        if isinstance(space, dict):
            parts = {name: native(part, f"{path}/{name}") for name, part in space.items()}
            if path in interface.tuples:
                return kinds.Tuple([parts[str(number)] for number in range(len(parts))])
            return kinds.Dict(parts)
        if isinstance(space, Box):
            return kinds.Box(space.low, space.high, space.shape, space.dtype.type)
        if isinstance(space, MultiDiscrete):
            if space.binary:
                axes = space.native_shape
                return kinds.MultiBinary(axes if len(axes) > 1 else axes[0])
            start = np.reshape(space.start or np.zeros(len(space.nvec), int), space.native_shape)
            return kinds.MultiDiscrete(np.reshape(space.nvec, space.native_shape), start=start)
        assert isinstance(space, Discrete)
        return kinds.Discrete(space.n, start=space.start)

    return native(getattr(interface, role), role)


def _valued(interface: Interface, role: str, values: PyTree) -> PyTree:
    """Returns values ``[T, ...]`` as the environment has them."""

    def valued(space: Space, values: PyTree) -> PyTree:
        if isinstance(space, dict):
            return {name: valued(part, values[name]) for name, part in space.items()}
        own = spaces.native(space, values)
        if isinstance(space, MultiDiscrete) and space.binary:
            return own.astype(np.int8)
        return own

    return spaces.tupled(valued(getattr(interface, role), values), interface.tuples, role)
