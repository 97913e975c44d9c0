"""Lets the API pages show an `Example:` of a docstring as code, as they do an `Examples:` section."""

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Renames the section while the sources are read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
