"""E2M1, E4M3 and E8M0, every code and every tie."""

import math

import pytest
import torch

from dsv4.errors import KernelError
from dsv4.formats import e2m1, e8m0, fp8

MAGNITUDES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
TIES = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5: 4}


def test_e2m1_codes_decode_to_the_table() -> None:
    found = e2m1.decode(torch.arange(16, dtype=torch.uint8)).tolist()
    assert found == MAGNITUDES + [-m for m in MAGNITUDES]
    assert math.copysign(1, found[8]) == -1


def test_e2m1_arithmetic_pattern_of_the_spec() -> None:
    for code in range(2, 8):
        bits = torch.tensor(0x3F000000 + (code << 22), dtype=torch.int32)
        assert float(bits.view(torch.float32)) == MAGNITUDES[code]


def test_every_packed_byte_decodes_low_nibble_first_and_packs_back() -> None:
    byte = torch.arange(256, dtype=torch.uint8)[:, None]
    code = e2m1.unpack(byte)
    assert code.tolist() == [[b & 15, b >> 4] for b in range(256)]
    assert torch.equal(e2m1.pack(code), byte)
    assert torch.equal(e2m1.decode_packed(byte), e2m1.decode(code))
    assert e2m1.decode_packed(torch.tensor([0xA0], dtype=torch.uint8)).tolist() == [0, -1]
    assert torch.equal(e2m1.encode(e2m1.decode(code)), code)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("tie", list(TIES))
def test_all_fourteen_ties_go_to_the_even_code(tie: float, sign: int) -> None:
    middle = torch.tensor([float(sign * tie)])
    below = torch.nextafter(middle, torch.zeros(1))
    above = torch.nextafter(middle, middle * 2)
    low = max(m for m in MAGNITUDES if m < tie)
    high = min(m for m in MAGNITUDES if m > tie)
    for value, expected in ((middle, TIES[tie]), (below, low), (above, high)):
        assert float(e2m1.decode(e2m1.encode(value))) == sign * expected
        assert float(e2m1.round_to(value)) == sign * expected


def test_e2m1_saturates_and_keeps_the_sign_of_zero() -> None:
    x = torch.tensor([1e9, -1e9, 7.0, -6.5, 0.0, -0.0])
    assert e2m1.encode(x).tolist() == [7, 15, 7, 15, 0, 8]
    assert e2m1.round_to(x).tolist() == [6, -6, 6, -6, 0, 0]


def test_round_to_equals_encode_on_random_values() -> None:
    x = torch.randn(20000, generator=torch.Generator().manual_seed(0)) * 3
    assert torch.equal(e2m1.round_to(x), e2m1.decode(e2m1.encode(x)))


def test_spec_vector_of_e2m1() -> None:
    x = torch.tensor(
        [0, -0.0, 0.25, -0.25, 0.75, 1.25, 1.75, 2.5, -2.5, 3.5, 5, -5, 6, -6, 0.5, 1.5]
    )
    assert bytes(e2m1.pack(e2m1.encode(x)).tolist()).hex() == "8080224" + "46ce6f731"


def test_odd_widths_and_signed_bytes_are_refused() -> None:
    with pytest.raises(KernelError, match="even"):
        e2m1.pack(torch.zeros(3, dtype=torch.uint8))
    for read in (e2m1.unpack, e2m1.decode_packed):
        with pytest.raises(KernelError, match="uint8"):
            read(torch.zeros(2, dtype=torch.int8))


def test_all_e4m3_codes() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    for code, value in enumerate(values.tolist()):
        exponent, mantissa = (code >> 3) & 15, code & 7
        if code & 0x7F == 0x7F:
            assert math.isnan(value)
            continue
        size = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        assert value == (-size if code & 128 else size)
        assert int(fp8.encode(torch.tensor(value)).view(torch.uint8)) == code
    finite = values[torch.isfinite(values)]
    assert finite.numel() == 254
    assert float(finite.max()) == 448
    powers = [v for v in finite[finite > 0].tolist() if math.frexp(v)[0] == 0.5]
    assert len(powers) == 18


def test_all_e4m3_ties_and_saturation() -> None:
    codes = torch.arange(0x7F, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).double()
    middle = ((values[1:] + values[:-1]) / 2).float()
    even = torch.where(codes[:-1] % 2 == 0, codes[:-1], codes[1:])
    assert torch.equal(fp8.encode(middle).view(torch.uint8), even)
    above = torch.nextafter(middle, torch.full_like(middle, 1e9))
    assert torch.equal(fp8.encode(above).view(torch.uint8), codes[1:])
    big = torch.tensor([449.0, 1e30, -1e30, 500])
    assert fp8.encode(big).float().tolist() == [448, 448, -448, 448]
    assert fp8.encode(torch.tensor(math.nan)).isnan()


def test_all_e8m0_bytes() -> None:
    found = e8m0.decode(torch.arange(256, dtype=torch.uint8)).tolist()
    assert found[:255] == [2.0 ** (b - 127) for b in range(255)]
    assert math.isnan(found[255])
    back = e8m0.from_exponent(torch.arange(-127, 128))
    assert back.tolist() == list(range(255))
    assert e8m0.from_exponent(torch.tensor([-500, 500])).tolist() == [0, 254]


def test_e8m0_against_torch() -> None:
    byte = torch.arange(255, dtype=torch.uint8)
    assert torch.equal(e8m0.decode(byte), byte.view(torch.float8_e8m0fnu).float())
