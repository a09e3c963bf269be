"""Counts the FLOPs and bytes of an operation from the shapes that the profiler recorded. No torch.

FLOPs are counted for matmuls and attention. Causal attention counts only the pairs of
tokens that it needs. Bytes are a lower bound: each argument is read once, and
each result is written once. What has no formula here is None, unknown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.measure.steps.kernels import is_generated, kind_of

ITEM_BYTES = {
    "double": 8,
    "long int": 8,
    "long": 8,
    "c10::complex<float>": 8,
    "c10::complex<double>": 16,
    "float": 4,
    "int": 4,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "short": 2,
    "short int": 2,
    "unsigned short": 2,
    "unsigned char": 1,
    "signed char": 1,
    "bool": 1,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
}
"""Bytes of an element by the profiler's name for its type."""
LIST = "TensorList"
"""The profiler's type of a list of tensors, whose dtype it does not record."""
CAUSAL_AT = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": 4,
    "aten::_scaled_dot_product_flash_attention": 4,
    "aten::_scaled_dot_product_efficient_attention": 6,
    "aten::_scaled_dot_product_cudnn_attention": 6,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 7,
    "aten::_scaled_dot_product_flash_attention_backward": 11,
    "aten::_scaled_dot_product_efficient_attention_backward": 11,
    "aten::_scaled_dot_product_cudnn_attention_backward": 14,
}
"""Attention operations, with the position of their `is_causal`."""
FREE = re.compile(
    r"view|reshape|expand|t|transpose|permute|slice|select|split|unbind|mT|as_strided|squeeze|"
    r"unsqueeze|detach|alias|_unsafe_view|_reshape_alias|empty|empty_strided|empty_like|resize_|"
    r"to|resolve_conj|resolve_neg|lift_fresh|result_type|promote_types|type_as"
)
"""Operations that make a view of a tensor, or only ask about it, and move nothing."""
READ_ONLY = frozenset({"linalg_vector_norm", "_foreach_norm"})
"""Reductions whose names are those of another class."""
ELEMENTWISE = frozenset({"masked_fill", "masked_fill_", "bitwise_not", "bitwise_and", "reciprocal"})
"""Elementwise operations whose names are those of another class."""
WRITTEN_LISTS = {"aten::_fused_adamw_": 3, "aten::_fused_adam_": 3, "aten::_fused_sgd_": 2}
"""Lists of tensors that fused optimizers write. They read one more, the gradients."""

Shape = list[int]


@dataclass(frozen=True)
class Call:
    """One recorded call of an operation."""

    name: str
    shapes: Sequence[Any]
    """Per argument: a shape, a list of shapes, or [] for what is no tensor. (): not recorded."""
    dtypes: Sequence[str]
    """The profiler's type of each argument."""
    values: Sequence[str]
    """Values of arguments that are no tensors, as text."""
    list_item_bytes: int | None = None
    """Bytes of an element in lists of tensors. None if unknown."""

    def tensors(self) -> list[int]:
        """Return the positions of the arguments that are tensors."""
        return [at for at, kind in enumerate(self.dtypes) if kind in ITEM_BYTES]

    def size(self, at: int) -> int:
        """Return the bytes of the tensor at a position."""
        return math.prod(map(int, self.shapes[at])) * ITEM_BYTES[self.dtypes[at]]


def flops_of(call: Call) -> int | None:
    """Return the floating-point operations of a call. None without a formula."""
    if call.name in CAUSAL_AT and call.shapes:
        return _attention_flops(call)
    sizes = _product_sizes(call)
    return None if sizes is None else 2 * math.prod(sizes)


def bytes_of(call: Call) -> int | None:
    """Return the bytes that a call reads and writes at least. None without a formula."""
    bare = call.name.removeprefix("aten::")
    if FREE.fullmatch(bare):
        return 0
    if LIST in call.dtypes:
        return _list_bytes(call)
    tensors = call.tensors()
    if not tensors:
        return None
    read = sum(map(call.size, tensors))
    if is_generated(call.name) or bare == "copy_":
        return read  # of a copy, the source is read and the destination written
    if bare in {"zero_", "fill_", "nll_loss_forward"}:
        return call.size(tensors[bare == "nll_loss_forward"])  # it picks one logit per target
    if bare == "nll_loss_backward":
        return call.size(tensors[1])  # it writes a gradient that is zero but for the targets
    if bare == "embedding":  # it reads only the rows that it looks up
        row_bytes = int(call.shapes[0][-1]) * ITEM_BYTES[call.dtypes[0]]
        return call.size(1) + 2 * math.prod(map(int, call.shapes[1])) * row_bytes
    written = _written(call, tensors)
    return None if written is None else read + written


def _written(call: Call, tensors: list[int]) -> int | None:
    """Return the bytes of the results."""
    first = tensors[0]
    shapes, item = call.shapes, ITEM_BYTES[call.dtypes[first]]
    if call.name in CAUSAL_AT:
        return sum(call.size(at) for at in ((1, 2, 3) if "backward" in call.name else (0,)))
    if call.name in _MATMULS:
        sizes = _product_sizes(call)
        return None if sizes is None else math.prod(sizes[:-1]) * item
    if call.name == "aten::embedding_dense_backward":
        return _number(call.values, 2) * shapes[0][-1] * item or None
    kind, bare = kind_of(call.name), call.name.removeprefix("aten::")
    if kind == "reduction" or bare in READ_ONLY:
        return 0  # far less than what is read
    if kind == "elementwise" or bare in ELEMENTWISE:
        return _broadcast([shapes[at] for at in tensors]) * item
    if kind == "normalisation" or "softmax" in call.name:
        return call.size(first)
    return None


def _list_bytes(call: Call) -> int | None:
    """Return the bytes of an operation on lists of tensors, such as an optimizer's step."""
    item = call.list_item_bytes
    if item is None:
        return None
    lists = [
        sum(map(math.prod, shapes))
        for shapes, kind in zip(call.shapes, call.dtypes, strict=True)
        if kind == LIST
    ]
    if call.name in WRITTEN_LISTS:
        written = WRITTEN_LISTS[call.name]
        numbers = lists[: written + 1]
        return item * (sum(numbers) + written * lists[0])
    return item * (sum(lists) + (lists[0] if call.name.endswith("_") else 0))


def _attention_flops(call: Call) -> int | None:
    backward = call.name.endswith("_backward")
    query, key, value = call.shapes[backward : backward + 3]
    if not (len(query) == len(key) == len(value) == 4):
        return None
    batch, heads, queries, size = query
    keys, causal = key[2], call.values[CAUSAL_AT[call.name] :][:1] == ["True"]
    pairs = queries * keys
    if causal and queries == keys:
        pairs = queries * (queries + 1) // 2
    forward = int(2 * batch * heads * pairs * (size + value[3]))
    return forward * 5 // 2 if backward else forward  # five products, and two in forward


def _mm(shapes: list[Shape]) -> Shape | None:
    left, right = shapes[:2]
    return [*left[:-1], right[-1], left[-1]] if len(left) == len(right) else None


def _addmm(shapes: list[Shape]) -> Shape | None:
    return _mm(shapes[1:])


def _linear(shapes: list[Shape]) -> Shape | None:
    """The weight is (out, in). In the fused variant another operand comes before it."""
    rows = shapes[0]
    weight = next(
        (one for one in shapes[1:3] if len(one) == 2 and one[1] == rows[-1] and one != rows),
        shapes[1],
    )
    return [*rows[:-1], *weight] if len(weight) == 2 and weight[1] == rows[-1] else None


_MATMULS: dict[str, Callable[[list[Shape]], Shape | None]] = {
    "aten::mm": _mm,
    "aten::bmm": _mm,
    "aten::addmm": _addmm,
    "aten::baddbmm": _addmm,
    "aten::_scaled_mm": _mm,
    "aten::linear": _linear,
    "mkldnn::_linear_pointwise": _linear,
}
"""Matmuls, with a function from shapes to [rows..., columns, size that is summed over]."""


def _product_sizes(call: Call) -> Shape | None:
    """Return [rows..., columns, size that is summed over] of a matmul."""
    formula = _MATMULS.get(call.name)
    shapes = [shape for shape in call.shapes if shape]
    return formula(shapes) if formula and len(shapes) > 1 + (formula is _addmm) else None


def _broadcast(shapes: list[Shape]) -> int:
    """Return the number of elements of the result of an elementwise operation."""
    longest = max(map(len, shapes), default=0)
    padded = [[1] * (longest - len(shape)) + shape for shape in shapes]
    return math.prod(map(max, zip(*padded, strict=True))) if longest else 1


def _number(values: Sequence[str], at: int) -> int:
    text = values[at] if at < len(values) else ""
    return int(text) if text.isdigit() else 0
