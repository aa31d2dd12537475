"""The base class that a pass needs for Inductor's caches to accept it; importing this imports a part of Inductor."""

from torch._inductor.custom_graph_pass import CustomGraphPass

__all__ = ["CustomGraphPass"]
