"""The class under test, by name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from verl_fl._errors import explain
from verl_fl.platform.base import Platform
from verl_fl.platform.check import check_class


def load(target: str) -> type[Platform]:
    """The class that ``package.module:Class`` or ``path/to/file.py:Class`` names.

    Raises:
        ValueError: the target has not that form, or the module has no such class.
        ImportError: the module can't be imported.
        TypeError: what it names is not a complete platform.
    """
    module_name, separator, class_name = target.partition(":")
    if not (module_name and separator and class_name):
        raise ValueError(
            explain("no platform is named", asked=target, legal="package.module:Class or path/to/file.py:Class")
        )
    try:
        module = _from_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
    except BaseException as error:  # a vendor's module may raise anything, sys.exit included
        if isinstance(error, KeyboardInterrupt):
            raise
        problem = f"{module_name} can't be imported: {type(error).__name__}: {error}"
        raise ImportError(
            explain(problem, asked=target, fix=f"python -c 'import {module_name}' shows the whole error")
        ) from error
    found = module
    for part in class_name.split("."):
        found = getattr(found, part, None)  # type: ignore[assignment]
    if found is None:
        names = [
            name for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, Platform)
        ]
        legal = ", ".join(name for name in names if name != "Platform") or "it has no platform"
        raise ValueError(explain(f"{module_name} has no {class_name}", asked=target, legal=legal))
    return check_class(found)


def spell(target: str | type) -> str:
    """The target's name for another process; a class is named by its module, or by its file where that is no module.

    Raises:
        ValueError: another process can't find the class.
    """
    if isinstance(target, str):
        return target
    module, name = sys.modules.get(target.__module__), target.__qualname__
    file = getattr(module, "__verl_fl_file__", None)
    if target.__module__ == "__main__":
        file = file or getattr(module, "__file__", None)
    if "<locals>" in name or (target.__module__ == "__main__" and file is None):
        raise ValueError(
            explain(
                f"another process can't find {target.__module__}.{name}",
                legal="a class that stands at the top of a module or a file",
                fix="move it there: the kit runs in processes of its own",
            )
        )
    return f"{file or target.__module__}:{name}"


def _from_file(path: str) -> ModuleType:
    file = Path(path).resolve()
    name = f"verl_fl_target_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.exists():
        raise FileNotFoundError(f"there is no file {file}")
    module = importlib.util.module_from_spec(spec)
    module.__dict__["__verl_fl_file__"] = str(file)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
