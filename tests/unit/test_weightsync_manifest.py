"""A manifest that contradicts itself does not exist; names of content say what they are."""

from __future__ import annotations

import pytest

from physarum.bus.errors import CodecError
from physarum.bus.version import Version
from physarum.weightsync.digest import digest_of, is_digest, verify
from physarum.weightsync.dtypes import by_code, by_name
from physarum.weightsync.errors import ChunkAlteredError, ManifestError
from physarum.weightsync.manifest import (
    Chunk,
    Manifest,
    TensorEntry,
    content_digest,
    decode_manifest,
    encode_manifest,
    manifest_digest,
)

EMPTY_XXH3 = "99aa06d3014798d86001c324468d497f"
EMPTY_BLAKE3 = "b3-af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
HALVES = (Chunk(digest_of(b"a" * 8), 8), Chunk(digest_of(b"b" * 4), 4))


def manifest(**changes: object) -> Manifest:
    tensor = TensorEntry("w", "float32", (3, 1), HALVES)
    plain: dict[str, object] = {
        "version": Version("policy", 1, 2),
        "parent": "policy@1.1",
        "model_digest": "m",
        "tensors": (tensor,),
        "total_bytes": 12,
        "step": 5,
        "created": 10.0,
        "metrics": {"loss": 0.5},
    }
    return Manifest(**{**plain, **changes})  # type: ignore[arg-type]


def test_digests_are_the_published_ones_of_nothing() -> None:
    assert digest_of(b"") == EMPTY_XXH3
    assert digest_of(b"", "blake3") == EMPTY_BLAKE3
    assert is_digest(EMPTY_XXH3) and is_digest(EMPTY_BLAKE3)


@pytest.mark.parametrize("text", ["", "..", "A" * 32, EMPTY_XXH3 + "0", "b3-" + "0" * 63, EMPTY_XXH3 + "\n"])
def test_only_digests_look_like_digests(text: str) -> None:
    assert not is_digest(text)


@pytest.mark.parametrize("digest", [EMPTY_XXH3, EMPTY_BLAKE3])
def test_altered_bytes_are_named(digest: str) -> None:
    verify(b"", digest, "here")
    with pytest.raises(ChunkAlteredError, match=f"here: 1 bytes have digest .*, expected {digest}"):
        verify(b"x", digest, "here")


def test_round_trip_keeps_everything() -> None:
    before = manifest()
    after = decode_manifest(encode_manifest(before))
    assert after == before
    assert manifest_digest(after) == manifest_digest(before)
    assert after.label == "policy@1.2"
    assert after.sizes() == {HALVES[0].digest: 8, HALVES[1].digest: 4}


def test_content_digest_ignores_when_it_was_published() -> None:
    later = manifest(created=11.0, step=6, metrics={}, parent=None)
    assert content_digest(later) == content_digest(manifest())
    assert manifest_digest(later) != manifest_digest(manifest())
    assert content_digest(manifest(version=Version("policy", 1, 3))) != content_digest(manifest())


def test_sizes_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ManifestError, match=r"tensor w of shape \(4,\) in float32 is 16 bytes, but its chunks hold 12"):
        TensorEntry("w", "float32", (4,), HALVES)
    with pytest.raises(ManifestError, match="says 13 bytes, but its tensors are 12"):
        manifest(total_bytes=13)
    with pytest.raises(ManifestError, match="1 different tensors in 2 entries"):
        manifest(tensors=manifest().tensors * 2, total_bytes=24)
    one, other = Chunk(EMPTY_XXH3, 8), Chunk(EMPTY_XXH3, 4)
    with pytest.raises(ManifestError, match="has two sizes, 4 and 8"):
        manifest(tensors=(TensorEntry("w", "float32", (3,), (one, other)),))


def test_a_chunk_name_that_could_leave_its_folder_is_refused_when_decoded() -> None:
    raw = encode_manifest(manifest()).replace(HALVES[0].digest.encode(), b"../../../../../../../etc/passwd0")
    with pytest.raises(CodecError, match="is no digest"):
        decode_manifest(raw)


def test_unknown_fields_and_types_are_refused() -> None:
    with pytest.raises(CodecError):
        decode_manifest(b"\x81\xa1a\x01")
    with pytest.raises(ManifestError, match="tensors of type complex64 cannot be published; expected one of float64"):
        TensorEntry("w", "complex64", (1,), HALVES)
    assert by_code("BF16") == by_name("bfloat16")


def test_manifests_do_not_change() -> None:
    with pytest.raises(AttributeError):
        manifest().step = 9  # type: ignore[misc]
