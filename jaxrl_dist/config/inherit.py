"""Classes of configs that refuse unknown fields, and that give inherited fields other defaults.

Imports nothing heavy, so that ``--help`` and a rejected flag are fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Self, get_type_hints

from jaxrl_dist.checks import shown
from jaxrl_dist.config.synonyms import OF_RUN, hint, missing, training
from jaxrl_dist.config.values import check_declared
from jaxrl_dist.errors import ConfigError


class Named:
    """A dataclass that refuses unknown fields with a
    ``ConfigError`` that suggests what to use instead.
    """

    def __new__(cls, *values: object, **fields: object) -> Self:
        known = getattr(cls, "__dataclass_fields__", fields)
        for name in fields:
            if name not in known:
                raise ConfigError(
                    f"{cls.__name__} has no field {name!r}{cls.unknown(name, list(known))}"
                )
        return super().__new__(cls)

    @classmethod
    def unknown(cls, name: str, known: list[str]) -> str:
        """Returns what to use instead of an unknown field, to be appended to a message."""
        of_run = " ".join(OF_RUN).split()

        def others(field: str) -> str:
            if field in of_run:
                return "Train has"
            if field != name:
                return "other algorithms have"
            return ""

        return hint(name, known, others)


class Inherits(Named):
    """A dataclass whose subclasses may give inherited fields other defaults:
    ``class Rainbow(DQN, num_atoms=51)``.

    Such a field keeps the type and docstring of the class that declares it. Values need names,
    since the order of fields is that of the bases.
    """

    def __new__(cls, *values: object, **fields: object) -> Self:
        if values:
            raise ConfigError(
                f"{cls.__name__} takes hyperparameters by name, but {shown(values[0])} has none; "
                f"{training(cls.__name__)}"
            )
        return super().__new__(cls, **fields)

    @classmethod
    def unknown(cls, name: str, known: list[str]) -> str:
        if name in ("env", "policy"):  # as Stable-Baselines3 makes a model
            return f"; its fields are hyperparameters, and {training(cls.__name__)}"
        return super().unknown(name, known)

    if not TYPE_CHECKING:

        @classmethod
        def load(cls, *paths: object, **options: object) -> NoReturn:
            raise AttributeError(missing(cls.__name__, "load"))

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(missing(type(self).__name__, name))

    def validate(self) -> None:
        """Raises ``ConfigError`` as ``check_declared`` does; subclasses also check
        what a declaration cannot say.
        """
        check_declared(self)

    def __init_subclass__(cls, **defaults: object) -> None:
        """Raises ``TypeError`` if a default names no inherited field."""
        super().__init_subclass__()
        if not defaults:
            return
        inherited: dict[str, Any] = {}
        for base in reversed(cls.__bases__):
            inherited |= get_type_hints(base, include_extras=True)
        for name, default in defaults.items():
            if name not in inherited:
                raise TypeError(f"{cls.__name__} inherits no field {name!r}")
            # a type, since the text of the annotation
            # may use names that the subclass's module does not import
            cls.__annotations__[name] = inherited[name]
            setattr(cls, name, default)
