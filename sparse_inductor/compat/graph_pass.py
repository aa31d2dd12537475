"""The base class of passes that Inductor's caches accept; importing this module imports a part of Inductor."""

from torch._inductor.custom_graph_pass import CustomGraphPass

__all__ = ["CustomGraphPass"]
