"""Publisher and checkpoint service over real HTTP: what was accepted is complete, verified, newest, and sent once."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from checkpoint_service import TOKEN, Service, publish, read_chunk, running_service, tensors

from physarum.bus.version import Version
from physarum.weightsync.digest import digest_of
from physarum.weightsync.errors import (
    ChunkAlteredError,
    ChunkMissingError,
    ChunksAbsentError,
    ServiceRefusedError,
    ServiceUnreachableError,
)
from physarum.weightsync.publisher import upload
from physarum.weightsync.service_client import CheckpointClient
from physarum.weightsync.snapshot import Snapshot

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]


@pytest_asyncio.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with running_service(tmp_path, keep_last=2, grace_s=-1.0) as running:
        yield running


@pytest_asyncio.fixture
async def client(service: Service) -> AsyncIterator[CheckpointClient]:
    async with aiohttp.ClientSession() as session:
        yield CheckpointClient(service.url, TOKEN, session, timeout_s=5.0)


async def raw(client: CheckpointClient, method: str, path: str, **more: object) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with client.session.request(method, client.url + path, headers=headers, **more) as response:  # type: ignore[arg-type]
        return response.status, await response.read()


async def test_second_version_sends_only_what_changed(service: Service, client: CheckpointClient) -> None:
    first = await publish(service, client, 1, tensors(1))
    assert service.sent("PUT /v1/chunks") == len(first.sizes()) == 8
    second = await publish(service, client, 2, tensors(2, changed=1))
    assert service.sent("PUT /v1/chunks") == 8 + 2 + 4  # tensor a changed; b and c went back to what seed 0 gives
    assert service.announced == [first, second]
    assert await client.get_manifest("policy@1.2") == second


async def test_publishing_again_sends_no_chunk_and_announces_again(service: Service, client: CheckpointClient) -> None:
    await publish(service, client, 1, tensors(1))
    sent = service.sent("PUT /v1/chunks")
    await publish(service, client, 1, tensors(1))
    assert service.sent("PUT /v1/chunks") == sent and len(service.announced) == 2
    assert len(service.catalogue.all()) == 1


async def test_older_epoch_is_refused_with_both_names(service: Service, client: CheckpointClient) -> None:
    await publish(service, client, 3, tensors(1), epoch=2)
    with pytest.raises(ServiceRefusedError, match=r"409: policy@1\.9 is older than policy@2\.3") as caught:
        await publish(service, client, 9, tensors(2), epoch=1)
    assert caught.value.status == 409


async def test_same_version_with_other_content_is_refused(service: Service, client: CheckpointClient) -> None:
    await publish(service, client, 1, tensors(1))
    with pytest.raises(ServiceRefusedError, match="accepted with other content"):
        await publish(service, client, 1, tensors(2))


async def test_altered_upload_names_both_digests_and_is_not_stored(service: Service, client: CheckpointClient) -> None:
    digest = digest_of(b"right")
    with pytest.raises(ServiceRefusedError, match=f"have digest {digest_of(b'wrong')}, expected {digest}") as caught:
        await client.put_chunk(digest, b"wrong")
    assert caught.value.status == 422 and not service.store.has(digest)
    with pytest.raises(ChunkMissingError):
        await read_chunk(client.url, digest, 5)
    status, text = await raw(client, "GET", "/metrics")
    assert status == 200 and b"physarum_checkpoint_checksum_failures_total 1\n" in text


async def test_manifest_before_its_chunks_is_refused_and_lists_them(service: Service, client: CheckpointClient) -> None:
    manifest = await publish(service, client, 1, tensors(1))
    victim = next(iter(manifest.sizes()))
    service.store.delete(victim)
    changed = type(manifest)(**{**{name: getattr(manifest, name) for name in manifest.__struct_fields__},
                                "version": Version("policy", 1, 2)})  # fmt: skip
    with pytest.raises(ChunksAbsentError) as caught:
        await client.put_manifest(changed)
    assert caught.value.digests == [victim]


async def test_chunk_that_vanishes_during_an_upload_is_sent_again(service: Service, client: CheckpointClient) -> None:
    def lose_one(request: web.Request) -> None:
        if request.path.startswith("/v1/manifests") and service.sent("PUT /v1/manifests") == 1:
            service.store.delete(next(service.store.folder.glob("??/*")).name)

    service.before = lose_one
    await publish(service, client, 1, tensors(1))
    assert service.sent("PUT /v1/chunks") == 9 and service.sent("PUT /v1/manifests") == 2


async def test_service_that_fails_for_a_while_is_asked_again(service: Service, client: CheckpointClient) -> None:
    def fail_twice(request: web.Request) -> web.StreamResponse | None:
        return web.Response(status=503, text="busy") if len(service.requests) <= 2 else None

    service.before = fail_twice
    await publish(service, client, 1, tensors(1))
    assert len(service.announced) == 1


async def test_a_full_disk_is_507_by_name_and_the_upload_goes_on_once_there_is_room(
    service: Service, client: CheckpointClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, answers = service.store.put, []

    def full_at_first(digest: str, data: bytes) -> bool:
        if len(answers) < 2:
            answers.append(digest)
            raise OSError(errno.ENOSPC, "No space left on device")
        return stored(digest, data)

    monkeypatch.setattr(service.store, "put", full_at_first)
    with pytest.raises(ServiceRefusedError, match=r"507: no room for a chunk of 4 bytes.*Free some there"):
        await client.put_chunk(digest_of(b"1234"), b"1234")
    await publish(service, client, 1, tensors(1))
    assert len(answers) == 2 and len(service.announced) == 1


async def test_unreachable_service_is_named_at_the_deadline() -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(
            ServiceUnreachableError, match=r"policy@1\.1 could not be published .* within 0\.3 s; the last"
        ):
            await upload(
                Snapshot.take(tensors(1).items()), Version("policy", 1, 1), "http://127.0.0.1:9", None, 0.3,
                session=session, model_digest="m", step=1,
            )  # fmt: skip


async def test_at_most_the_agreed_number_of_chunks_is_under_way(service: Service, client: CheckpointClient) -> None:
    under_way, most = 0, 0
    store_put = service.store.put

    def counted(digest: str, data: bytes) -> bool:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            return store_put(digest, data)
        finally:
            under_way -= 1

    service.store.put = counted  # type: ignore[method-assign, assignment]
    await publish(service, client, 1, tensors(1))
    assert 1 <= most <= 4


async def test_range_requests_are_answered(service: Service, client: CheckpointClient) -> None:
    digest = digest_of(b"0123456789")
    await client.put_chunk(digest, b"0123456789")
    headers = {"Authorization": f"Bearer {TOKEN}", "Range": "bytes=2-4"}
    async with client.session.get(f"{client.url}/v1/chunks/{digest}", headers=headers) as response:
        assert (response.status, await response.read()) == (206, b"234")
    _, text = await raw(client, "GET", "/metrics")
    assert b"physarum_checkpoint_bytes_out_total 3\n" in text


async def test_longer_answer_than_named_is_refused(service: Service, client: CheckpointClient) -> None:
    digest = digest_of(b"0123456789")
    await client.put_chunk(digest, b"0123456789")
    with pytest.raises(ChunkAlteredError, match="is 10 bytes, expected 4"):
        await read_chunk(client.url, digest, 4)


@pytest.mark.parametrize("token", [None, "", "s3cre", "s3cret2", "ſ3cret"])
async def test_wrong_token_is_refused_everywhere(service: Service, client: CheckpointClient, token: str | None) -> None:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    for path in ("/v1/manifests", "/metrics", f"/v1/chunks/{digest_of(b'')}"):
        async with client.session.get(client.url + path, headers=headers) as response:
            assert response.status == 401


@pytest.mark.parametrize("body", [b"{}", b'["../../x"]', b"[1]", b"\xff"])
async def test_malformed_questions_are_400(client: CheckpointClient, body: bytes) -> None:
    status, _ = await raw(client, "POST", "/v1/missing", data=body)
    assert status == 400


async def test_malformed_manifests_are_400(service: Service, client: CheckpointClient) -> None:
    status, text = await raw(client, "PUT", "/v1/manifests/policy@1.1", data=b"\xc1")
    assert status == 400 and b"not a valid Manifest" in text
    assert service.announced == []


async def test_older_versions_are_given_up_with_their_chunks(service: Service, client: CheckpointClient) -> None:
    for number in (1, 2, 3):
        await publish(service, client, number, tensors(number))
    assert [held.label for held in service.catalogue.all()] == ["policy@1.2", "policy@1.3"]
    status, text = await raw(client, "GET", "/v1/manifests")
    assert status == 200 and b"policy@1.1" not in text and b'"label":"policy@1.3"' in text
    assert len(list(service.store.folder.glob("??/*"))) == 2 * 6 + 2


async def test_concurrent_publishers_of_one_version_make_one_version(
    service: Service, client: CheckpointClient
) -> None:
    await asyncio.gather(*(publish(service, client, 1, tensors(1)) for _ in range(4)))
    assert len(service.catalogue.all()) == 1
