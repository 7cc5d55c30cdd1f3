"""Arrays, masks and records on the wire: what comes back is what went, or CodecError."""

from __future__ import annotations

import struct
from typing import Any

import msgpack  # type: ignore[import-untyped]
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from physarum.bus.codec import ARRAY_EXT, MASK_EXT, decode, encode, pack, unpack
from physarum.bus.errors import CodecError
from physarum.bus.records import Sample
from physarum.bus.version import Span

DTYPES = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"]
LITTLE = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)


class Holder(msgspec.Struct):
    """A record with an array, as records have them."""

    values: np.ndarray[Any, Any]
    name: str = ""


def a_sample(mask: np.ndarray[Any, Any]) -> Sample:
    response = len(mask)
    return Sample(
        token_ids=np.arange(response + 2, dtype=np.int32),
        prompt_len=2,
        loss_mask=mask,
        logprobs=np.full(response, -0.5, np.float32),
        spans=[Span("policy@1.2", 0, response)] if response else [],
        reward=1.0,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_with_its_bits_shape_and_type(dtype: str) -> None:
    values = np.arange(6).reshape(2, 3).astype(dtype)
    for back in (unpack(pack(values)), decode(encode(Holder(values)), Holder).values):
        assert back.dtype == np.dtype(dtype) and back.shape == (2, 3)
        np.testing.assert_array_equal(back, values)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, LITTLE)))
def test_any_array_comes_back_bit_for_bit(values: np.ndarray[Any, Any]) -> None:
    back = unpack(pack(values))
    assert back.shape == values.shape and back.dtype == values.dtype and back.tobytes() == values.tobytes()


def test_a_scalar_array_keeps_no_dimension() -> None:
    assert unpack(pack(np.array(7, np.int64))).shape == ()


def test_big_endian_and_strided_arrays_travel_as_their_values() -> None:
    values = np.arange(10, dtype=">i4")[::3]
    np.testing.assert_array_equal(unpack(pack(values)), [0, 3, 6, 9])


def test_not_a_number_survives_with_its_payload() -> None:
    values = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)
    assert unpack(pack(values)).tobytes() == values.tobytes()


def test_what_arrives_cannot_be_written_into() -> None:
    back = unpack(pack(np.zeros(3, np.float32)))
    with pytest.raises(ValueError, match="read-only"):
        back[0] = 1.0


@settings(max_examples=300, deadline=None)
@given(hnp.arrays(np.bool_, st.integers(0, 300)))
def test_any_mask_comes_back_and_costs_at_most_a_bit_per_token(mask: np.ndarray[Any, Any]) -> None:
    wire = pack(mask)
    back = unpack(wire)
    assert back.dtype == np.bool_
    np.testing.assert_array_equal(back, mask)
    assert len(wire) <= 11 + (mask.size + 7) // 8  # ext head (6), kind and size (5)


def test_a_multi_turn_mask_costs_less_than_a_byte_per_eight_tokens() -> None:
    """Masks as lists once cost a byte per token and more."""
    turns = [np.repeat([True, False], [700, 300]) for _ in range(8)]
    mask = np.concatenate(turns)
    assert len(pack(mask)) == 2 + 1 + 5 + 17 * 4  # ext 8 head, kind and size, then 17 runs (the first one empty)
    assert len(pack(mask)) * 8 < mask.size
    with_mask, without = len(encode(a_sample(mask))), len(encode(a_sample(mask[:0])))
    assert with_mask - without < 8000 * (4 + 4) + 8000 // 8  # token ids and log-probabilities take four bytes each


def test_a_mask_that_alternates_travels_as_bits() -> None:
    mask = np.arange(8000) % 2 == 0
    assert len(pack(mask)) == 4 + 5 + 1000  # ext 16 head, kind and size, bits


def test_msgpack_and_msgspec_write_the_same_bytes() -> None:
    values = np.arange(4, dtype=np.int32)
    assert pack({"values": values, "name": "x"}) == encode(Holder(values, "x"))


def test_numpy_scalars_travel_as_numbers() -> None:
    assert unpack(pack({"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True)})) == {"a": 0.5, "b": 3, "c": True}


@pytest.mark.parametrize("value", [object(), 1j, 1 << 64, np.array(["text"]), np.array([None]), np.zeros(2, "c8")])
def test_what_has_no_wire_form_is_refused(value: object) -> None:
    with pytest.raises(CodecError, match="cannot travel"):
        pack(value)
    with pytest.raises(CodecError, match="cannot travel"):
        encode(Loose(value))


class Loose(msgspec.Struct):
    value: Any


def test_a_table_of_bools_is_refused_with_the_dtypes_that_travel() -> None:
    with pytest.raises(CodecError, match="dtype bool cannot travel; expected one of .* or a bool vector"):
        pack(np.zeros((2, 2), np.bool_))


def test_truncation_at_any_byte_is_a_codec_error() -> None:
    wire = encode(a_sample(np.array([True, False, True])))
    assert decode(wire, Sample).response_len == 3
    for length in range(len(wire)):
        with pytest.raises(CodecError):
            decode(wire[:length], Sample)
        with pytest.raises(CodecError):
            unpack(wire[:length])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_an_altered_byte_gives_a_record_or_a_codec_error(data: st.DataObject) -> None:
    wire = bytearray(encode(a_sample(np.arange(20) % 3 == 0)))
    wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(wire), Sample)
    except CodecError as error:
        assert str(error)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_noise_is_a_codec_error_or_a_value(noise: bytes) -> None:
    for read in (unpack, lambda data: decode(data, Sample)):
        try:
            read(noise)
        except CodecError as error:
            assert str(error)


def ext(code: int, body: bytes) -> bytes:
    return bytes(msgpack.packb(msgpack.ExtType(code, body)))


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (ext(9, b"x"), r"unknown extension type 9; this version knows 1 \(array\) and 2 \(mask\)"),
        (ext(ARRAY_EXT, struct.pack("<BBI", 99, 1, 0)), r"dtype code 99; this version knows 0\.\.10"),
        (ext(ARRAY_EXT, struct.pack("<BBI", 0, 1, 3) + b"\0" * 8), r"shape \(3,\) holds 2 elements"),
        (ext(ARRAY_EXT, struct.pack("<BBI", 0, 1, 1) + b"\0" * 3), "an array of 9 bytes cannot be read"),
        (ext(ARRAY_EXT, struct.pack("<BBII", 0, 2, 1 << 31, 1 << 31)), "array"),
        (ext(ARRAY_EXT, b"\0"), "an array of 1 bytes cannot be read"),
        (ext(MASK_EXT, struct.pack("<BI", 1, 9) + b"\0"), "mask of 9 bits holds 1 bytes"),
        (ext(MASK_EXT, struct.pack("<BIII", 0, 9, 3, 5)), "mask runs add up to 8, expected 9"),
        (ext(MASK_EXT, struct.pack("<BI", 7, 0)), "mask of kind 7"),
        (ext(MASK_EXT, struct.pack("<BIII", 0, 0xFFFFFFFF, 0, 0xFFFFFFFF)), "4294967295 entries"),
        (b"\x81\x90\x01", "not MessagePack"),  # a map whose key is a list
        (b"\x91" * 2000, "not MessagePack"),
    ],
)
def test_malformed_wire_is_named(wire: bytes, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        unpack(wire)


def test_a_record_error_at_the_edge_is_a_codec_error_with_its_words() -> None:
    wire = pack({"token_ids": np.arange(3), "prompt_len": 5, "loss_mask": np.zeros(0, bool), "logprobs": np.zeros(0)})
    with pytest.raises(CodecError, match="not a valid Sample: prompt_len is 5 of 3 tokens"):
        decode(wire, Sample)


def test_a_list_where_an_array_belongs_and_an_unknown_field_are_refused() -> None:
    with pytest.raises(CodecError, match="found list where an array was expected"):
        decode(pack({"values": [1, 2]}), Holder)
    with pytest.raises(CodecError, match="unknown field `colour`"):
        decode(pack(msgspec.structs.asdict(a_sample(np.array([True]))) | {"spans": [], "colour": 1}), Sample)


def test_an_error_in_a_union_of_records_is_named() -> None:
    class A(msgspec.Struct, tag="a"):
        x: int

    class B(msgspec.Struct, tag="b"):
        y: int

    with pytest.raises(CodecError, match="not a valid .*A .*B"):
        decode(pack({"type": "c"}), A | B)  # type: ignore[arg-type]
