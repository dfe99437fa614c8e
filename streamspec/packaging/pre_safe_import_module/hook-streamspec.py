"""PyInstaller: in a checkout, the sub-packages adapters, export and runtime stand beside the folder `streamspec`; an
installation has nothing to add.
"""

from typing import Any

import streamspec


def pre_safe_import_module(api: Any) -> None:
    """Tells PyInstaller the further folders of the package's path."""
    for folder in list(streamspec.__path__)[1:]:
        api.append_package_path(folder)
