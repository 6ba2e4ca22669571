"""Repairs of Triton's interpreter, without which bf16 and FP8 are silently wrong.

bf16 products, casts and arithmetic go through torch: round to nearest even, FP8 saturating.
Block-scaled products read E4M3 scales as what they are. Then what the interpreter computes anew
for every instruction although it never changes: types, shapes, a check whose result it drops.
Import it after setting TRITON_INTERPRET=1 and before any module with kernels.
"""

import functools
import os
import sys
from dataclasses import replace

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as interp

if os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("the interpreter shim needs TRITON_INTERPRET=1 before triton is imported")
_KERNELS = ("_triton", "_device", "_gluon")
_EARLY = [name for name in sys.modules if name.startswith("dsv4.ops") and name.endswith(_KERNELS)]
if _EARLY:
    raise RuntimeError(f"{_EARLY[0]} was imported before the interpreter shim")

Handle, Builder = interp.TensorHandle, interp.InterpreterBuilder
Semantic = type(interp.interpreter_semantic)
TORCH = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
STORAGE = {
    8: (np.uint8, torch.uint8),
    16: (np.int16, torch.int16),
    32: (np.int32, torch.int32),
}
COMPARE = (np.less, np.greater, np.less_equal, np.greater_equal, np.equal, np.not_equal)
BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift)
LIMIT = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}

_convert, _cast = interp._convert_float, Builder.cast_impl
_binary, _unary = Builder.binary_op, Builder.unary_op


def _value(data, dtype):
    bits = np.ascontiguousarray(data).view(STORAGE[dtype.primitive_bitwidth][0])
    return torch.from_numpy(bits).view(TORCH[dtype])


def _f32(handle):
    return _value(handle.data, handle.dtype.scalar).float().numpy()


def _down(x, dtype):
    value = torch.from_numpy(np.ascontiguousarray(x)).float()
    if dtype in LIMIT:
        value = torch.where(value.isnan(), value, value.clamp(-LIMIT[dtype], LIMIT[dtype]))
    bits = value.to(TORCH[dtype]).contiguous().view(STORAGE[dtype.primitive_bitwidth][1])
    return bits.numpy().view(interp._get_np_dtype(dtype))


def convert(x, source, target, mode):
    if source not in TORCH or target not in TORCH or mode == interp._ir.ROUNDING_MODE.RTZ:
        return _convert(x, source, target, mode)
    unsigned = getattr(np, f"uint{target.primitive_bitwidth}")
    return _down(_value(x, source).float().numpy(), target).view(unsigned).reshape(x.shape)


def cast(self, source, target):
    old, new = source.dtype.scalar, target.scalar
    if "bf16" not in (old.name, new.name) or old == new:
        return _cast(self, source, target)
    x = _f32(source) if old in TORCH else source.data.astype(np.float32)
    return Handle(_down(x, new) if new in TORCH else x.astype(interp._get_np_dtype(target)), new)


def binary(self, left, right, op):
    if left.dtype.scalar != tl.bfloat16 or op in BITWISE:
        return _binary(self, left, right, op)
    result = op(_f32(left), _f32(right))
    if op in COMPARE:
        return Handle(result, tl.int1)
    return Handle(_down(result, tl.bfloat16), tl.bfloat16)


def unary(self, value, op):
    if value.dtype.scalar != tl.bfloat16:
        return _unary(self, value, op)
    return Handle(_down(op(_f32(value)), tl.bfloat16), tl.bfloat16)


def dot(self, a, b, acc, precision, imprecise):
    kind = acc.dtype.scalar
    if not a.dtype.scalar.is_floating():
        product = a.data.astype(np.int64) @ b.data.astype(np.int64)
        return Handle(product.astype(acc.data.dtype) + acc.data, kind)
    if a.dtype.scalar.primitive_bitwidth == 16:
        return Handle(_down(_by_sixteens(_f32(a), _f32(b), _f32(acc)), kind), kind)
    # exact for FP8, so that no library's order of summation shows
    product = (_f32(a).astype(np.float64) @ _f32(b).astype(np.float64)).astype(np.float32)
    return Handle(_down(product + _f32(acc), kind), kind)


def _by_sixteens(a, b, acc):
    """As matrix units do: 16 columns after 16, so that a product's bits do not show its width."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    for k in range(0, a.shape[-1], 16):
        product = a[..., k : k + 16] @ b[..., k : k + 16, :]
        acc = (product + acc).astype(np.float32)
    return acc


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
E2M1 = np.concatenate([E2M1, -E2M1])


def _operand(value, scale, kind, packed_along_k, is_right):
    """float64 numbers of one side of a block-scaled product; K is the last axis of a left one."""
    along = -1 if packed_along_k != is_right else -2
    if kind == "e2m1":
        codes = np.moveaxis(value.data.view(np.uint8), along, -1)
        pairs = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], -1)
        numbers = np.moveaxis(pairs.reshape(*codes.shape[:-1], -1), -1, along)
    else:
        numbers = _f32(value).astype(np.float64)
    if scale is None:
        return numbers
    if scale.dtype.scalar == tl.float8e4nv:
        factor = _f32(scale).astype(np.float64)
    else:
        factor = np.exp2(scale.data.view(np.uint8).astype(np.float64) - 127)
    k = numbers.shape[-2 if is_right else -1]
    factor = np.repeat(factor, k // factor.shape[-1], -1)
    return numbers * (np.swapaxes(factor, -1, -2) if is_right else factor)


def dot_scaled(self, a, a_scale, a_kind, b, b_scale, b_kind, acc, fast, a_pack, b_pack, out):
    """The exact product of a tile, rounded once to float32, then added: so the bits of a result
    show the order of tiles along K, not how a library sums inside one."""
    values = (a, a_scale, a_kind, b, b_scale, b_kind, acc, a_pack, b_pack)
    a, a_scale, a_kind, b, b_scale, b_kind, acc, a_pack, b_pack = (
        v.value if isinstance(v, tl.constexpr) else v for v in values
    )
    a, b = self._bitcast_to_fp_type(a, a_kind), self._bitcast_to_fp_type(b, b_kind)
    scales = [None if scale is None else scale.handle for scale in (a_scale, b_scale)]
    left = _operand(a.handle, scales[0], a_kind, a_pack, False)
    right = _operand(b.handle, scales[1], b_kind, b_pack, True)
    result = (left @ right).astype(np.float32)
    if acc is not None:
        result = result + acc.handle.data
    kind = tl.block_type(tl.float32, list(result.shape))
    return tl.tensor(Handle(result, tl.float32), kind)


def bf16_constant(self, value):
    return Handle(_down(np.array([value], np.float32), tl.bfloat16), tl.bfloat16)


def _bool_mask(name, position):
    # a scalar condition spread over a tile comes out as uint8, which loads and stores refuse
    original = getattr(Builder, name)

    def patched(self, *args, **options):
        mask = args[position]
        if mask is not None and mask.data.dtype != np.bool_:
            mask = Handle(mask.data.astype(np.bool_), mask.dtype.scalar)
        return original(self, *args[:position], mask, *args[position + 1 :], **options)

    setattr(Builder, name, patched)


_patched = set()
_seen_functions = set()


def patch_once(function):
    """The language is patched at its first use and stays so: the interpreter does it anew at
    every call of a device function, which took a third of the time."""
    if function not in _seen_functions:
        _seen_functions.add(function)
        values = function.__globals__.values()
        languages = {id(module) for module in (tl, tl.core) if any(v is module for v in values)}
        if not languages <= _patched:
            _patch_language(function)
            _patched.update(languages)
    return interp._LangPatchScope()


_tensor_init, _block_init = tl.tensor.__init__, tl.block_type.__init__
_equal, _broadcast = tl.dtype.__eq__, Semantic.broadcast_impl_value
_np_dtype = functools.cache(interp._get_np_dtype)


def _facts_of_tensors(kind):
    tensor = object.__new__(tl.tensor)
    _tensor_init(tensor, None, kind)
    return {k: v for k, v in vars(tensor).items() if k not in ("handle", "type", "dtype")}


_SCALAR = _facts_of_tensors(tl.int32)


@functools.cache
def _facts_of_shape(shape):
    """What a type of blocks and its tensors know, but for the type of an element."""
    kind = object.__new__(tl.block_type)
    _block_init(kind, tl.int32, list(shape))
    facts = {k: v for k, v in vars(kind).items() if k not in ("element_ty", "name")}
    return {**facts, "facts_of_tensors": _facts_of_tensors(kind)}


def block_init(self, element_ty, shape):
    sizes = tuple(s.value if isinstance(s, tl.constexpr) else s for s in shape)
    self.__dict__.update(_facts_of_shape(sizes))
    self.element_ty = element_ty


def block_name(self, name):
    if name == "name":  # for messages only, and costly
        return f"<{self.shape}, {self.element_ty}>"
    raise AttributeError(name)


def tensor_init(self, handle, type):
    self.__dict__.update(type.facts_of_tensors if type.is_block() else _SCALAR)
    self.handle, self.type, self.dtype = handle, type, type.scalar


def broadcast(self, left, right):
    a, b = left.type, right.type
    if a.is_block() and b.is_block():
        same = a.shape.values == b.shape.values
    else:
        same = not a.is_block() and not b.is_block()
    return (left, right) if same else _broadcast(self, left, right)


tl.block_type.__init__, tl.block_type.__getattr__ = block_init, block_name
tl.tensor.__init__ = tensor_init
tl.dtype.__eq__ = lambda self, other: self is other or _equal(self, other)
Semantic.broadcast_impl_value = broadcast
interp._get_np_dtype = lambda kind: (
    np.dtype(np.uint64) if kind.scalar.is_ptr() else _np_dtype(kind.scalar)
)
# every sum of integers was computed twice more; the interpreter checks nothing unless it debugs
interp.interpreter_builder.options = replace(
    interp.interpreter_builder.options, sanitize_overflow=False
)
_patch_language = interp._patch_lang
interp._patch_lang = patch_once
_bool_mask("create_masked_load", 1)
_bool_mask("create_masked_store", 2)
interp._convert_float, Builder.cast_impl = convert, cast
Builder.binary_op, Builder.unary_op = binary, unary
Builder.create_dot, Builder.get_bf16 = dot, bf16_constant
Semantic.dot_scaled = dot_scaled
