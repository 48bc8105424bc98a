"""Films a trained policy."""

from __future__ import annotations

import contextlib
import importlib
import pathlib
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_dist.actors.evaluate import Evaluation
from jaxrl_dist.actors.film import film, speed, write_gif
from jaxrl_dist.errors import ConfigError
from jaxrl_dist.play.policy import Policy
from jaxrl_dist.run.storage import check_place, replacing


def record(
    policy: Policy,
    out: str | pathlib.Path,
    episodes: int = 1,
    seed: int = 0,
    fps: float | None = None,
    max_steps: int | None = 1000,
    *,
    sampled: bool | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[Evaluation, int]:
    """Plays episodes and writes them, one after the other,
    to an animated GIF or an MP4 film (H.264).

    An evaluation with the same seed plays these episodes first.

    Args:
      out: the file to write; it must end in ``.gif``, or in ``.mp4``,
        which needs the package imageio-ffmpeg.
      episodes: number of episodes, at most 128; with several agents,
        one episode of each agent counts as one.
      fps: frames per second; in a GIF rounded to the nearest rate that its hundredths of a second
        allow. None: as the environment says, at most 50, or else 30.
      max_steps: as for ``Evaluator``.
      sampled: as for ``Policy.evaluate``.
      progress: called with the number of finished episodes.

    Returns:
      The evaluation, and the number of frames.

    Raises:
      ConfigError: the environment cannot be drawn, the file's directory or the package is missing,
        or the file has another ending.
      OSError: the file cannot be written; an older file stays unchanged.
    """
    spec = policy.source.spec
    out = pathlib.Path(out)
    evaluator = policy.evaluator(episodes * spec.num_agents, seed, max_steps, sampled)
    write = writer(out)
    filmed = film(evaluator, spec, spec.keyed(policy.variables), episodes, progress)
    assert filmed is not None, "nothing stops it"
    evaluation, pictures = filmed
    write(pictures, fps or speed(spec))
    return evaluation, len(pictures)


def writer(out: pathlib.Path) -> Callable[[Sequence[Any], float], None]:
    """Returns the function that writes ``(pictures, fps)`` to a file in the format of its name,
    after checking that it can.

    Raises:
      ConfigError: the file's directory or the package is missing, or the file has another ending.
    """
    encode = {".gif": write_gif, ".mp4": write_mp4}.get(out.suffix.lower())
    if encode is None:
        raise ConfigError(f"{out} must end in .gif or .mp4; name another file")
    if encode is write_mp4:
        _ffmpeg()
    check_place(out)

    def write(pictures: Sequence[Any], fps: float) -> None:
        with replacing(out) as partial:
            encode(pictures, partial, fps)

    return write


def write_mp4(pictures: Sequence[Any], file: pathlib.Path, fps: float) -> None:
    """Writes pictures of Pillow as an MP4 film (H.264), which browsers play.

    Raises:
      ConfigError: the package is missing, or the pictures differ in size.
      OSError: the file cannot be written.
    """
    width, height = size = pictures[0].size
    if any(picture.size != size for picture in pictures):
        raise ConfigError(
            "the pictures differ in size, which only a .gif can hold; name a file that ends in .gif"
        )
    # H.264 needs even sides: odd ones get a column or a row of black.
    width = width + width % 2
    height = height + height % 2
    frames = f"-f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {fps:g} -i -"
    film = "-vcodec libx264 -pix_fmt yuv420p -f mp4 -y"
    command = [_ffmpeg(), "-loglevel", "error", *frames.split(), *film.split(), str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and says why
            for picture in pictures:
                process.stdin.write(picture.convert("RGB").crop((0, 0, width, height)).tobytes())
        _, message = process.communicate()
    if process.returncode:
        raise OSError(f"ffmpeg cannot write the film: {message.decode(errors='replace').strip()}")


def _ffmpeg() -> str:
    """Returns the path of the ffmpeg that the package imageio-ffmpeg brings.

    Raises:
      ConfigError: it is not installed.
    """
    try:
        path: str = importlib.import_module("imageio_ffmpeg").get_ffmpeg_exe()
    except ImportError:
        raise ConfigError(
            "a film in .mp4 needs a package that is not installed: pip install imageio-ffmpeg; or "
            "name a file that ends in .gif"
        ) from None
    return path
