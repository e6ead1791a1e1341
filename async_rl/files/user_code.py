"""Code of users: a module or a file is imported by name, and travels by value to processes that cannot import it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, cast, get_origin, get_type_hints

import cloudpickle
from pydantic import TypeAdapter, WrapValidator

from agent_loop.user_errors import describe_error

_PREFIX = "async_rl_user_"


def import_module(name: str) -> ModuleType:
    """Import a module, or a file `.py`. The recipes of an installed wheel are below `async_rl`."""
    if name.endswith(".py"):
        return _import_file(Path(name))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if name.partition(".")[0] != "recipes" or error.name is None or not error.name.startswith("recipes"):
            raise
        return importlib.import_module(f"async_rl.{name}")


def user_class(name: str, *, key: str, kind: type[Any]) -> type[Any]:
    """The subclass FILE.py:CLASS or MODULE:CLASS of `kind`.

    Args:
        name: place of the class.
        key: config key that names it, for errors.
        kind: base class, a dataclass.

    Raises:
        ValueError: it cannot be imported, is no subclass, has no method that it needs, or has options that are no
            fields.
    """
    module, _, attribute = name.rpartition(":")
    try:
        found = getattr(import_module(module), attribute)
        options = get_type_hints(found) if isinstance(found, type) else {}
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{key}.name is {name!r}, which cannot be imported: {describe_error(error)}; give 'FILE.py:CLASS' or "
            "'MODULE:CLASS'"
        ) from error
    if not isinstance(found, type):
        problem = f"a {type(found).__name__}; name a class"
    elif not issubclass(found, kind):
        problem = f"which is no subclass of {kind.__name__}; derive it from that"
    elif missing := sorted(found.__abstractmethods__):
        problem = f"which has no method {', '.join(missing)}; define it"
    elif lost := [o for o in options if o not in found.__dataclass_fields__ and get_origin(options[o]) is not ClassVar]:
        problem = f"whose {', '.join(lost)} cannot be set; put @bounded({key!r}) of agent_loop.bounds on the class"
    else:
        return found
    raise ValueError(f"{key}.name is {name!r}, {problem}")


def or_user_class(kind: type[Any], *, key: str, problem_of: Callable[[Any], str]) -> WrapValidator:
    """A validator of config classes by their `name`, that also takes a user's subclass of `kind`.

    `{"name": "mine.py:MyLoss", "cap": 3.0}` becomes `MyLoss(name="/home/me/mine.py:MyLoss", cap=3.0)`: the absolute
    path also holds for a process that reads the stored config in another directory.

    Args:
        kind: base class.
        key: config key, for errors.
        problem_of: what is wrong with an object of a user's class; "" for nothing.
    """

    def validate(value: Any, handler: Any) -> Any:
        given = cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}
        name = given.get("name")
        if not isinstance(name, str) or ":" not in name:
            return handler(value)
        found = user_class(name, key=key, kind=kind)
        module, _, attribute = name.rpartition(":")
        place = f"{Path(module).resolve()}" if module.endswith(".py") else module
        try:
            made = TypeAdapter(found).validate_python({**given, "name": f"{place}:{attribute}"})
            problem = problem_of(made)
        except ValueError:  # of a bound, or a rule of the class
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - code of a user may raise anything
            made, problem = None, f"which failed: {describe_error(error)}"
        if problem:
            raise ValueError(f"{key}.name is {name!r}, {problem}")
        return made

    return WrapValidator(validate)


def imported_files() -> list[ModuleType]:
    """The modules that `import_module` made of files; other processes cannot import them."""
    loaded = list(sys.modules.items())  # a copy, because other threads import meanwhile
    return [module for name, module in loaded if name.startswith(_PREFIX)]


def _import_file(path: Path) -> ModuleType:
    """Import a file; it finds the modules in its folder."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = f"{_PREFIX}{path.stem}"  # not the name of an installed module
    if name in sys.modules and sys.modules[name].__file__ == str(path):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    pickler: Any = cloudpickle
    pickler.register_pickle_by_value(module)  # other processes cannot import it
    return module
