"""Number formats once more, in numpy and by table: the test's own opinion of the bits."""

import math

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float64)


def _e4m3_value(code: int) -> float:
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 0:
        return mantissa * 2.0**-9
    return (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3 = np.array([_e4m3_value(code) for code in range(0x7F)], dtype=np.float64)


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Code of the nearest table value, ties to the even code, saturating."""
    magnitude = np.abs(values.astype(np.float64))
    high = np.clip(np.searchsorted(table, magnitude), 1, len(table) - 1)
    low = high - 1
    below, above = magnitude - table[low], table[high] - magnitude
    take_high = (above < below) | ((above == below) & (high % 2 == 0))
    return np.where(magnitude >= table[-1], len(table) - 1, np.where(take_high, high, low))


def e2m1_codes(values: np.ndarray) -> np.ndarray:
    return (nearest(values, E2M1) + 8 * np.signbit(values)).astype(np.uint8)


def e4m3_codes(values: np.ndarray) -> np.ndarray:
    return (nearest(values, E4M3) + 128 * np.signbit(values)).astype(np.uint8)


def e2m1_values(codes: np.ndarray) -> np.ndarray:
    return (E2M1[codes & 7] * np.where(codes & 8, -1.0, 1.0)).astype(np.float32)


def e4m3_values(codes: np.ndarray) -> np.ndarray:
    return (E4M3[codes & 127] * np.where(codes & 128, -1.0, 1.0)).astype(np.float32)


def pack(codes: np.ndarray) -> np.ndarray:
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def ceil_exponent(amax: float, limit: float) -> int:
    """Smallest k with amax <= limit * 2^k, by trying."""
    k = math.floor(math.log2(amax / limit)) - 1
    while amax > limit * 2.0**k:
        k += 1
    return k


def mxfp4(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(packed, scale bytes, exact float32 values)."""
    rows, cols = w.shape
    blocks = w.reshape(rows, cols // 32, 32)
    amax = np.maximum(np.abs(blocks).max(-1), 6 * 2.0**-126)
    exponent = np.array([[ceil_exponent(float(a), 6) for a in row] for row in amax])
    factor = (2.0**exponent)[..., None]
    codes = e2m1_codes(blocks / factor)
    values = (e2m1_values(codes) * factor).astype(np.float32).reshape(rows, cols)
    return pack(codes.reshape(rows, cols)), (exponent + 127).astype(np.uint8), values


def nvfp4(
    w: np.ndarray, g: float | None = None
) -> tuple[np.ndarray, np.ndarray, np.float32, np.ndarray]:
    """(packed, scale codes, global, float32 values) by the ordinary recipe."""
    rows, cols = w.shape
    top = np.float32(np.abs(w).max() / np.float32(2688) if g is None else g)
    blocks = w.astype(np.float32).reshape(rows, cols // 16, 16) / top
    scale = e4m3_codes(np.clip(np.abs(blocks).max(-1) / 6, 2.0**-9, 448))
    factor = e4m3_values(scale)[..., None]
    codes = e2m1_codes(blocks / factor)
    values = (e2m1_values(codes) * factor * top).reshape(rows, cols)
    return pack(codes.reshape(rows, cols)), scale, top, values.astype(np.float32)


def fp8_tiles(w: np.ndarray, block: int = 128, power_of_two: bool = True):
    """(codes, scales as floats, scale bytes, float32 values)."""
    rows, cols = w.shape
    grid = (math.ceil(rows / block), math.ceil(cols / block))
    scale = np.zeros(grid, dtype=np.float32)
    codes = np.zeros(w.shape, dtype=np.uint8)
    values = np.zeros(w.shape, dtype=np.float32)
    for i in range(grid[0]):
        for j in range(grid[1]):
            tile = np.s_[i * block : (i + 1) * block, j * block : (j + 1) * block]
            amax = float(np.abs(w[tile]).max()) or 1.0
            one = 2.0 ** ceil_exponent(amax, 448) if power_of_two else amax / 448
            scale[i, j] = one
            codes[tile] = e4m3_codes(w[tile].astype(np.float32) / scale[i, j])
            values[tile] = e4m3_values(codes[tile]) * scale[i, j]
    exponent = (np.round(np.log2(scale)) + 127).astype(np.uint8)
    return codes, scale, exponent, values
