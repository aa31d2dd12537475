"""Whether a match can be rewritten in its graph: the checks that all patterns share."""

from __future__ import annotations

import logging

import torch
from torch import fx

from . import compat
from .ability import unimportable, unsupported_reason
from .facts import facts_of
from .graph.checks import check_match
from .graph.fakes import fake, has_gradient, tensors_in
from .graph.memory import storages
from .graph.no_match import NoMatch, once
from .graph.view import GraphView, label
from .pattern import Match, Miss

log = logging.getLogger("sparse_inductor")

_told: set[str] = set()  # warnings that have been logged


def unrewritable(match: Match, view: GraphView, hooked: bool) -> Miss | None:
    """Return why a match cannot be rewritten in its graph; None if it can.

    hooked: whether the program has saved-tensor hooks, which may assume that all saved tensors are floating-point.
    """
    # The operators have no rule for torch.func's transforms.
    if transform := view.transforms.get(match.anchor):
        reason = f"this runs inside {transform}, which the operator does not take part in"
        return Miss(reason, match.anchor)
    needs_grad = has_gradient(match.anchor)
    facts = facts_of(match.op)
    if facts.returns_list and needs_grad and compat.setting("cpp_wrapper"):
        reason = "Inductor's C++ wrapper calls no operator that returns a list, as this one does in training"
        return Miss(reason, match.anchor)
    if facts.saves_integers and needs_grad and hooked:
        reason = "the program has saved-tensor hooks, and the operator saves integers"
        return Miss(reason, match.anchor)
    if view.differentiates_twice:
        reason = (
            "the program differentiates a gradient (create_graph=True), and the operator has a first "
            "derivative only"
        )
        return Miss(reason, match.anchor)
    if lacking := _lacking(match):
        return Miss(f"there is no operator here: {lacking}", match.anchor)
    for node in (*match.matched_nodes, *match.inputs):
        for t in tensors_in(fake(node)):
            if not compat.computes_as_tensors_do(type(t)):
                reason = f"{label(node)} is a {type(t).__name__}, a tensor subclass with operations of its own"
                return Miss(reason, match.anchor)
    kept = storages([fake(node) for node in match.inputs])
    for node, kind in _given_subclasses(view):
        if storages(fake(node)) & kept:
            reason = f"{label(node)} is a {kind.__name__}, a subclass that no operator takes"
            return Miss(reason, match.anchor)
    try:
        check_match(view, match)
    except NoMatch as decline:
        return decline.miss(match.anchor)
    return None


@once
def _given_subclasses(view: GraphView) -> list[tuple[fx.Node, type]]:
    """Return the inputs of a graph that are not plain tensors, each with its class."""
    given = [(n, compat.given_class(n)) for n in view.graph.find_nodes(op="placeholder")]
    plain = {kind for kind in {kind for _, kind in given} if compat.computes_as_tensors_do(kind)}
    return [(node, kind) for node, kind in given if kind not in plain]


def without_kernels(match: Match) -> Miss | None:
    """Return why the kernels of a match's operator cannot be imported, and log it once; None if they can be.

    Called only for matches that are to be rewritten, because the import is slow.
    """
    device = next((t.device for t in tensors_in(fake(match.anchor))), torch.device("cpu"))
    lacking = unimportable(match.op, device)
    if not lacking:
        return None
    _warn_once(f"{match.pattern}: nothing is rewritten on {device}: {lacking}")
    return Miss(f"there is no operator here: {lacking}", match.anchor)


def _lacking(match: Match) -> str:
    """Return what the kernels lack for a match's tensors or device; for a device, also log it once."""
    values = [v for n in match.matched_nodes for v in tensors_in(fake(n))]
    if any(v.is_nested for v in values):
        return "the tensors are nested"
    device = next((t.device for t in tensors_in(fake(match.anchor))), None)
    lacking = "" if device is None else unsupported_reason(device)
    if lacking:
        _warn_once(f"nothing is rewritten on {device}: {lacking}")
    return lacking


def _warn_once(text: str) -> None:
    if text not in _told:
        _told.add(text)
        log.warning("%s", text)
