"""Compiler passes for torch.compile that make sparse models fast without changing them.

    import torch, sparse_inductor
    sparse_inductor.enable()
    model = torch.compile(model)
    ...
    print(sparse_inductor.report())

Everything is imported on first use: `TORCH_LOGS=+sparse_inductor` imports this package in the
middle of `import torch`, when neither Inductor nor torch.library can be imported yet.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import ops as ops
    from . import testing as testing
    from .explanation.explain import explain as explain
    from .index import SparseIndex as SparseIndex
    from .pattern import register as register
    from .reporting.records import report as report
    from .session import disable as disable
    from .session import enable as enable
    from .session import enabled as enabled
    from .session import options as options
    from .template import Template as Template

__version__ = "0.1.0"

# Public name -> the module that defines it. No module may have the name of a public function:
# importing a submodule binds its name in the package, so `sparse_inductor.report` would become
# that module.
_HOME = {
    "enable": "session",
    "disable": "session",
    "enabled": "session",
    "options": "session",
    "report": "reporting.records",
    "explain": "explanation.explain",
    "register": "pattern",
    "Template": "template",
    "ops": "ops",
    "testing": "testing",
    "SparseIndex": "index",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_HOME[name]}")
    value = module if name == _HOME[name] else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*_HOME, *(name for name in globals() if name.startswith("__"))})
