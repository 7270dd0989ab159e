"""What the generated types need of typing."""

from typing import TYPE_CHECKING, Any, Mapping

if TYPE_CHECKING:
    from typing import TypeAlias as TypeAlias
else:
    TypeAlias = Any  # Python 3.9 has none

Part = Mapping[str, Any]
"""A part of an answer, as in the JSON: an item, or a party of a draw."""
