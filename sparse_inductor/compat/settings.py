"""Inductor's configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any


def _inductor_config() -> Any:
    from torch._inductor import config

    return config


def has_setting(name: str) -> bool:
    """Whether this torch's Inductor knows the setting."""
    return name in _inductor_config()._config


def setting(name: str) -> Any:
    """The setting as a compile in this thread sees it."""
    return getattr(_inductor_config(), name)


@dataclasses.dataclass(frozen=True)
class SavedSetting:
    """What `restore_setting` needs to put a setting back exactly, unset or the same object."""

    name: str
    override: Any
    default: Any


def save_setting(name: str) -> SavedSetting:
    """Remember a setting, whether it was set or only has its default."""
    entry = _inductor_config()._config[name]
    return SavedSetting(name, _override(entry), entry.default)


def set_setting(name: str, value: Any, default: Any = None) -> None:
    """Set a setting: here to `value`, in threads that have not set it to `default` (if given).

    In 2.13 a setting (a ContextVar) is a matter of one thread or asyncio task, so "process-wide"
    takes both: a server compiles on worker threads, and autograd compiles backward graphs on its
    own.
    """
    config = _inductor_config()
    entry = config._config[name]
    setattr(config, name, value)
    if default is not None and isinstance(entry.user_override, ContextVar):
        entry.default = default
        _forget_config_cache(config)


def restore_setting(saved: SavedSetting, override: bool = True) -> None:
    """Put a setting back; with `override=False` only for the other threads."""
    config = _inductor_config()
    entry = config._config[saved.name]
    entry.default = saved.default
    if override:
        # Through the front door first: it marks the config's cached hash and dictionary as
        # outdated.
        setattr(config, saved.name, saved.default)
        if isinstance(entry.user_override, ContextVar):
            entry.user_override.set(saved.override)
        else:
            entry.user_override = saved.override
    _forget_config_cache(config)


def _override(entry: Any) -> Any:
    value = entry.user_override
    return value.get() if isinstance(value, ContextVar) else value


def _forget_config_cache(config: Any) -> None:
    if isinstance(dirty := getattr(config, "_get_dict_dirty_keys_var", None), ContextVar):
        dirty.set(None)


@contextlib.contextmanager
def patched_settings(**settings: Any) -> Iterator[None]:
    """Inductor settings for a block, in this thread; what this torch does not know is left out."""
    with _inductor_config().patch(
        {name: value for name, value in settings.items() if has_setting(name)}
    ):
        yield


def inductor_cache_folder() -> str:
    """Where Inductor keeps what it generates; the folder need not be there yet."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()
