"""Classes of configs that refuse unknown fields, and that give inherited fields other defaults.

Imports nothing heavy, so that ``--help`` and a rejected flag are fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_type_hints

from jaxrl_dist.checks import shown
from jaxrl_dist.config.synonyms import OF_RUN, hint, missing, training
from jaxrl_dist.config.values import check_declared
from jaxrl_dist.errors import ConfigError


class Named:
    """A dataclass that refuses unknown fields with a
    ``ConfigError`` that suggests what to use instead.
    """

    def __new__(cls, *values: Any, **fields: Any) -> Any:
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
        run = " ".join(OF_RUN).split()
        others = "other algorithms have"
        return hint(
            name,
            known,
            lambda field: "Train has" if field in run else others if field != name else "",
        )


class _Missing:
    """A method that users of Stable-Baselines3 look for in a class; none of a dataclass's
    fields.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        raise AttributeError(missing(owner.__name__, self._name))


class Inherits(Named):
    """A dataclass whose subclasses may give inherited fields other defaults:
    ``class Rainbow(DQN, num_atoms=51)``.

    Such a field keeps the type and docstring of the class that declares it. Values need names,
    since the order of fields is that of the bases.
    """

    def __new__(cls, *values: Any, **fields: Any) -> Any:
        if values:
            text = f"{cls.__name__} takes its fields by name, and {shown(values[0])} has none"
            raise ConfigError(f"{text}; they are hyperparameters, and {training(cls.__name__)}")
        return super().__new__(cls, **fields)

    @classmethod
    def unknown(cls, name: str, known: list[str]) -> str:
        if name in ("env", "policy"):  # as Stable-Baselines3 makes a model
            return f"; its fields are hyperparameters, and {training(cls.__name__)}"
        return super().unknown(name, known)

    if not TYPE_CHECKING:
        load = _Missing()

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(missing(type(self).__name__, name))

    def validate(self) -> None:
        """Raises ``ConfigError`` as ``check_declared`` does;
        subclasses check what a declaration cannot say, too.
        """
        check_declared(self)

    def __init_subclass__(cls, **defaults: Any) -> None:
        """Raises ``TypeError`` if a default names no inherited field."""
        super().__init_subclass__()
        hints: dict[str, Any] = {}  # those of the bases: the class's own fields are added later
        for base in reversed(cls.__bases__) if defaults else ():
            hints |= get_type_hints(base, include_extras=True)
        for name, default in defaults.items():
            if name not in hints:
                raise TypeError(f"{cls.__name__} inherits no field {name!r}")
            # As a type: the annotation's text may use names that
            # the subclass's module does not import.
            cls.__annotations__[name] = hints[name]
            setattr(cls, name, default)
