"""Words of others for a terminal: no markup, no emoji, nothing in them steers it. Escaped before widths are taken."""

from typing import Any

from rich.console import Console
from rich.style import StyleType
from rich.text import Text

from rollfleet_protocol.words import visible


class Words(Text):
    """A text that may hold what others wrote."""

    def __init__(self, text: str = "", style: StyleType = "") -> None:
        super().__init__(visible(text), style)

    def append(self, text: "Text | str", style: StyleType | None = None) -> "Words":
        """As Text does."""
        super().append(visible(text) if isinstance(text, str) else text, style)
        return self


class PlainConsole(Console):
    """Prints strings, cells of tables among them, as they are."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """As Console does."""
        return super().render_str(visible(text), **options)
