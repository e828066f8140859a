"""Derived tensors of a module, their sources, and which of them an update of the weights did not reach.

Inference engines keep tensors that are computed from a weight once: MLA's W_UV and W_UK_T from kv_b_proj, a fused QKV
from three projections. Where such a tensor is a view, an in-place update of the weight reaches it. Where it became a
copy (`.contiguous()`, or MindSpeed's `torch.Tensor.view` that makes its argument contiguous first), it keeps the
weights of the day it was made, and answers come from a model that nobody trains.

Nothing is known of the module beforehand. A copy is recognised by its content: it equals a strided view of its source
(any chain of view, split, transpose and slice is one), or its sources are strided views of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

INFORMATIVE = 16
"""Fewer distinct values (ones of a fresh norm, a mask) tell nothing about where a tensor comes from."""

STARTS = 64
"""Places where the largest value of a tensor may occur in another; more, and the content is no fingerprint."""

COMBINATIONS = 256
LEVELS = 3
"""A source is looked for in the module that owns the derived tensor and in so many modules around it."""

TORCH_ATTRIBUTES = frozenset(vars(torch.nn.Module()))
BIT_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Place:
    """A tensor as a strided view of another one's flat content."""

    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Derivation:
    """`name` was computed from `source`."""

    name: str
    source: str
    shares: bool
    """one storage: an in-place update of the source reaches it"""
    place: Place | None = None
    """of a copy: where it lies in its source, or (`fused`) where its source lies in it"""
    fused: bool = False

    def __str__(self) -> str:
        kind = "shares the storage of" if self.shares else "holds a copy of" if self.fused else "is a copy from"
        return f"{self.name} {kind} {self.source}"


def derivations(module: torch.nn.Module) -> list[Derivation]:
    """Every derived tensor of `module` whose source is one of its weights."""
    sources = weights(module)
    found = []
    for name, tensor in derived_tensors(module).items():
        found += _sources_of(name, tensor, sources)
    return found


def stale(module: torch.nn.Module, before: list[Derivation]) -> list[Derivation]:
    """Those of `before` that no longer hold: the source was updated and the derived tensor was not."""
    sources, derived = weights(module), derived_tensors(module)
    return [
        known
        for known in before
        if known.name in derived
        and known.source in sources
        and not _holds(known, derived[known.name], sources[known.source])
    ]


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a weight update writes: parameters and persistent buffers."""
    transient = {
        f"{path}.{name}" if path else name
        for path, owner in module.named_modules()
        for name in owner._non_persistent_buffers_set
    }
    buffers = {name: buffer for name, buffer in module.named_buffers() if name not in transient}
    return {name: tensor.detach() for name, tensor in (*module.named_parameters(), *buffers.items())}


def derived_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that no update writes: plain attributes, also of helper objects, and non-persistent buffers."""
    known = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    found = {}
    for path, owner in module.named_modules():
        prefix = f"{path}." if path else ""
        for name, value in vars(owner).items():
            if name not in TORCH_ATTRIBUTES:
                for inner, tensor in _tensors_in(value, name):
                    if id(tensor) not in known and tensor.numel():
                        found[prefix + inner] = tensor.detach()
        for name in sorted(owner._non_persistent_buffers_set):
            if (buffer := owner._buffers.get(name)) is not None:
                found[prefix + name] = buffer.detach()
    return found


def locate(part: torch.Tensor, whole: torch.Tensor) -> Place | None:
    """Where `part` lies in `whole` as a strided view; None if it does not, or if its content is no fingerprint.

    The search starts from the largest values of `part`, which are rare in weights.
    """
    if part.dtype != whole.dtype:
        whole = whole.to(part.dtype)
    if part.numel() > whole.numel() or not _tells_apart(part):
        return None
    magnitude = part.abs().float()
    anchor = tuple(int(i) for i in torch.unravel_index(magnitude.argmax(), part.shape))
    values, flat = _bits(part), _bits(whole).flatten()
    starts = (flat == values[anchor]).nonzero().flatten().tolist()
    if len(starts) > STARTS:
        return None
    fibres = [_fibre(values, magnitude, anchor, dim) for dim in range(part.dim())]
    seconds = [(flat == fibre[second]).nonzero().flatten() for fibre, second in fibres]
    for start in starts:
        choices = [
            _strides(flat, start, position, fibre, second, at)
            for at, (fibre, second), position in zip(anchor, fibres, seconds, strict=True)
        ]
        for strides in itertools.islice(itertools.product(*choices), COMBINATIONS):
            place = Place(start - sum(map(int.__mul__, strides, anchor)), strides)
            view = _view(flat, part.shape, place)
            if view is not None and torch.equal(view, values):
                return place
    return None


# -- the module's tensors -----------------------------------------------------------------------------


def _tensors_in(value, name: str, depth: int = 2) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in an attribute: itself, in a container, in the attributes of a plain object (vLLM's `impl`)."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth == 0 or isinstance(value, (torch.nn.Module, type)):
        return
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors_in(item, f"{name}.{index}", depth - 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors_in(item, f"{name}.{key}", depth - 1)
    else:
        for key, item in getattr(value, "__dict__", {}).items():
            yield from _tensors_in(item, f"{name}.{key}", depth - 1)


def _sources_of(name: str, tensor: torch.Tensor, sources: dict[str, torch.Tensor]) -> list[Derivation]:
    storage = tensor.untyped_storage().data_ptr()
    shared = [s for s, weight in sources.items() if weight.untyped_storage().data_ptr() == storage != 0]
    if shared:
        return [Derivation(name, source, shares=True) for source in shared[:1]]
    fused = []
    for near in _by_nearness(name, sources):
        for source in near:
            if place := locate(tensor, sources[source]):
                return [Derivation(name, source, shares=False, place=place)]
            if sources[source].numel() < tensor.numel() and (place := locate(sources[source], tensor)):
                fused.append(Derivation(name, source, shares=False, place=place, fused=True))
        if fused:
            return fused
    return []


def _by_nearness(name: str, sources: dict[str, torch.Tensor]) -> Iterator[list[str]]:
    """Sources below the owner of `name`, then those below the module around it, and so on; none twice."""
    seen: set[str] = set()
    prefix = name
    for _ in range(LEVELS + 1):
        prefix = prefix.rpartition(".")[0]
        near = [s for s in sources if s not in seen and (not prefix or s.startswith(f"{prefix}."))]
        seen.update(near)
        yield near
        if not prefix:
            return


def _holds(known: Derivation, derived: torch.Tensor, source: torch.Tensor) -> bool:
    if known.shares:
        if derived.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
            return True
        return locate(derived, source) is not None
    part, whole = (source, derived) if known.fused else (derived, source)
    view = _view(_bits(whole.to(part.dtype)).flatten(), part.shape, known.place)
    return view is not None and torch.equal(view, _bits(part))


# -- content ----------------------------------------------------------------------------------------


def _tells_apart(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
        return False
    sample = tensor.flatten()[:: max(1, tensor.numel() // 4096)]
    return sample.unique().numel() >= INFORMATIVE


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The content as integers: equal means bitwise equal."""
    return tensor.contiguous().view(BIT_TYPES[tensor.element_size()])


def _view(flat: torch.Tensor, shape: torch.Size, place: Place) -> torch.Tensor | None:
    last = place.offset + sum((size - 1) * stride for size, stride in zip(shape, place.strides, strict=True))
    if place.offset < 0 or last >= flat.numel():
        return None
    return flat.as_strided(shape, place.strides, place.offset)


def _fibre(values: torch.Tensor, magnitude: torch.Tensor, anchor: tuple, dim: int) -> tuple[torch.Tensor, int]:
    """The line through `anchor` along `dim`, and the index of its largest value besides the anchor's."""
    line = (*anchor[:dim], slice(None), *anchor[dim + 1 :])
    others = magnitude[line].clone()
    if len(others) > 1:
        others[anchor[dim]] = -1
    return values[line], int(others.argmax())


def _strides(flat, start: int, positions: torch.Tensor, fibre: torch.Tensor, second: int, at: int) -> list[int]:
    """Strides with which `fibre` is found in `flat` when its element `at` lies at `start`."""
    if len(fibre) == 1:
        return [1]
    distance = positions - start
    strides = distance[distance % (second - at) == 0] // (second - at)
    first, last = start - strides * at, start + strides * (len(fibre) - 1 - at)
    strides = strides[(strides > 0) & (first >= 0) & (last < flat.numel())][:COMBINATIONS]
    steps = torch.arange(len(fibre), device=flat.device) - at
    matching = (flat[start + strides[:, None] * steps] == fibre).all(1)
    return strides[matching].tolist()
