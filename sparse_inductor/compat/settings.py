"""Inductor's configuration."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple


def _inductor_config() -> Any:
    from torch._inductor import config

    return config


def has_setting(name: str) -> bool:
    """Whether this torch's Inductor knows the setting."""
    return name in _inductor_config()._config


def setting(name: str) -> Any:
    """Return the setting as a compile in this thread sees it."""
    return getattr(_inductor_config(), name)


class SavedSetting(NamedTuple):
    """The state with which `restore_setting` restores a setting exactly: unset, or the same object."""

    name: str
    override: Any
    default: Any


def save_setting(name: str) -> SavedSetting:
    """Save a setting, including whether it was set or only has its default."""
    entry = _inductor_config()._config[name]
    return SavedSetting(name, _override(entry), entry.default)


def set_setting(name: str, value: Any, default: Any = None) -> None:
    """Set a setting to `value` in this thread, and to `default` (if given) in threads that have not set it.

    In torch 2.13 each thread or asyncio task has its own value of a setting (a ContextVar), so a process-wide change
    needs both: a server compiles on worker threads, and autograd compiles backward graphs on its own threads.
    """
    config = _inductor_config()
    entry = config._config[name]
    setattr(config, name, value)
    if default is not None and isinstance(entry.user_override, ContextVar):
        entry.default = default
        _forget_config_cache(config)


def restore_setting(saved: SavedSetting, override: bool = True) -> None:
    """Restore a setting; with `override=False` only for the other threads."""
    config = _inductor_config()
    entry = config._config[saved.name]
    entry.default = saved.default
    if override:
        # Use the public setter first: it marks the config's cached hash and dictionary as outdated.
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
    """Change settings of Inductor for a block, in this thread; settings that this torch does not have are left out."""
    with _inductor_config().patch(
        {name: value for name, value in settings.items() if has_setting(name)}
    ):
        yield


def ranks_compile_alike() -> bool:
    """Whether the ranks of a distributed job have to compile the same graphs at the same time, because they exchange
    data while they compile, or order their collectives by the graph."""
    from torch._dynamo import config

    names = (
        "reorder_for_compute_comm_overlap",
        "aten_distributed_optimizations.enable_overlap_scheduling",
        "distributed_max_autotune_gemm",
    )
    return config.enable_compiler_collectives or any(
        has_setting(name) and bool(setting(name)) for name in names
    )


def inductor_cache_folder() -> str:
    """Return the folder of Inductor's caches, which need not exist yet."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()
