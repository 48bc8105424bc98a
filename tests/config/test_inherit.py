"""Fields that a config inherits with another default."""

from __future__ import annotations

import dataclasses

import pytest

from jaxrl_dist import cli
from jaxrl_dist.algorithms.ddpg import DDPG
from jaxrl_dist.algorithms.td3 import TD3
from jaxrl_dist.config.inherit import Inherits

pytestmark = pytest.mark.quick


@dataclasses.dataclass(frozen=True)
class Base(Inherits):
    x: int = 1
    y: float = 2.0


@dataclasses.dataclass(frozen=True)
class Sub(Base, y=3.0):
    z: int = 4


@dataclasses.dataclass(frozen=True)
class SubSub(Sub, x=5):
    pass


def test_a_field_is_inherited_with_another_default() -> None:
    """The base keeps its own; places of fields do not change."""
    given = [dataclasses.astuple(each()) for each in (Base, Sub, SubSub)]
    assert given == [(1, 2.0), (1, 3.0, 4), (5, 3.0, 4)]
    assert SubSub(x=7, z=8) == SubSub(x=7, y=3.0, z=8)
    names = [[field.name for field in dataclasses.fields(each)] for each in (DDPG, TD3)]
    assert names[0] == names[1] and (DDPG().noise, TD3().noise) == (
        "ornstein_uhlenbeck",
        "gaussian",
    )


def test_a_field_must_be_there() -> None:
    with pytest.raises(TypeError, match="Wrong inherits no field 'w'"):
        type("Wrong", (Base,), {}, w=1)


def test_help_says_the_new_default_and_the_inherited_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["train", "ddpg", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "constant within an episode (Plappert et al. 2018). (ornstein_uhlenbeck)" in shown
    assert "Number of critics; the smallest value is the target (section 4.2). (1)" in shown
