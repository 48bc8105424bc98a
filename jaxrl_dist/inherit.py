"""How a config inherits hyperparameters with other defaults."""

from __future__ import annotations

import typing
from typing import Any


class Inherits:
    """A dataclass whose subclasses may give inherited fields other defaults: ``class Rainbow(DQN, num_atoms=51)``.

    Type and docstring of such a field are those of the class that declares it.
    """

    def __init_subclass__(cls, **defaults: Any) -> None:
        """Raises ``TypeError`` if there is no such field."""
        super().__init_subclass__()
        fields = getattr(cls, "__dataclass_fields__", {})  # of the bases: those of the class itself come later
        for name, default in defaults.items():
            if name not in fields:
                raise TypeError(f"{cls.__name__} inherits no field {name!r}")
            # As a type: the annotation's text may name what the subclass's module does not import.
            cls.__annotations__[name] = typing.get_type_hints(cls.__base__, include_extras=True)[name]
            setattr(cls, name, default)
