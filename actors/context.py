"""What every actor is given: who it is, its configuration, its connection to the bus, and the wish that it stop."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

from physarum.actors.address import own_address
from physarum.bus import metrics, names
from physarum.bus.blob_access import Blobs
from physarum.bus.blobs import BlobStore
from physarum.bus.claims import ClaimBook
from physarum.bus.connection import Bus
from physarum.bus.endpoint import Endpoint
from physarum.bus.names import StreamKey
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register
from physarum.configs.blobs import BlobsConfig
from physarum.configs.machines import HEAD
from physarum.configs.placement import machine_of
from physarum.configs.root import RootConfig
from physarum.configs.run import AT

T = TypeVar("T", bound=msgspec.Struct)


class Identity(msgspec.Struct, frozen=True):
    """`run/role/instance`: one process."""

    run: str
    role: str
    instance: str

    @property
    def index(self) -> int:
        """The number behind the last '-' of the instance's name."""
        return int(self.instance.rsplit("-", 1)[1])

    def __str__(self) -> str:
        return f"{self.run}/{self.role}/{self.instance}"


class RunFolder(msgspec.Struct, frozen=True):
    """Where a run keeps its files. `policy`: whose start model, checkpoints and results are meant, "" for the run's own."""

    path: Path
    policy: str = ""

    def of_policy(self, name: str) -> RunFolder:
        """The same folder, for the files of another policy."""
        return RunFolder(self.path, name)

    @property
    def own(self) -> Path:
        """Where the policy's own files are."""
        return self.path / "policies" / self.policy if self.policy else self.path

    @property
    def run(self) -> str:
        """The run's name; a folder of one machine's part carries that machine's behind it."""
        return self.path.name.partition(AT)[0]

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def version(self) -> Path:
        """The version of the layout of this folder and of the records in its store."""
        return self.path / "VERSION"

    @property
    def endpoint(self) -> Path:
        return self.path / "bus" / "endpoint.json"

    @property
    def bus(self) -> Path:
        return self.path / "bus"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def actors(self) -> Path:
        return self.path / "actors"

    @property
    def checkpoints(self) -> Path:
        return self.own / "checkpoints"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def archive(self) -> Path:
        """Samples that were trimmed from the log and kept (`samples.keep`)."""
        return self.path / "archive"

    @property
    def exports(self) -> Path:
        """Versions in Hugging Face form (`trainer.export_every`)."""
        return self.own / "exports"

    @property
    def unfinished(self) -> Path:
        """Is there while replay, import or fork make the run: a folder that still has it was not made whole."""
        return self.path / "unfinished"

    @property
    def lineage(self) -> Path:
        """What run this one was made from, when it was made by replay, import or fork."""
        return self.path / "lineage.json"

    @property
    def model(self) -> Path:
        return self.own / "model"

    @property
    def start_model(self) -> Path:
        """A link to the folder of the start model, whatever made it."""
        return self.own / "start_model"

    @property
    def start_model_record(self) -> Path:
        """Where the start model came from."""
        return self.own / "start_model.json"

    @property
    def blobs(self) -> BlobStore:
        """The store of this machine, for tools that work beside the run's folder; actors use `Context.blobs`."""
        return BlobStore(self.path / "blobs")

    @property
    def blob_stores(self) -> list[BlobStore]:
        """Every store in this folder: that of the first checkpoint actor, then those of further ones of this machine."""
        return [BlobStore(path) for path in sorted(self.path.glob("blobs*"))]

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"


class Context:
    """One actor's surroundings. `draining` is set when it should finish what it holds and take nothing new.

    Who works for one policy is given `config` and `folder` as that policy has them (policies.py)."""

    def __init__(
        self,
        identity: Identity,
        config: RootConfig,
        folder: RunFolder,
        endpoint: Endpoint,
        bus: Bus,
        publisher: Publisher,
    ) -> None:
        self.identity = identity
        self.config = config
        self.folder = folder
        self.endpoint = endpoint
        self.bus = bus
        self.publisher = publisher
        # Heartbeats have a window of their own: work that waits for a full stream must not silence the actor.
        self.heartbeat_publisher = Publisher(bus)
        self.host = socket.gethostname()
        self.address = own_address()
        self.started_at = psutil.Process().create_time()
        self.claims = ClaimBook(bus, self.heartbeat_publisher, identity.role, identity.instance, self.started_at)
        cache = folder.path / "blob_cache" / identity.instance
        token_env = config.checkpoint.token_env
        self.blobs = Blobs(bus, folder.path / "blobs", cache, _blobs(config, identity), token_env, self.host)
        self.draining = asyncio.Event()
        self.paused = False
        self.resumed = asyncio.Event()
        """Set while it is not paused, and for good once it drains: who waits for it goes on."""
        self.resumed.set()
        self.halted = asyncio.Event()
        """Set while nothing new may be begun: it is paused, or drains."""

    def pause(self) -> None:
        self.paused = True
        self.resumed.clear()
        self.halted.set()

    def resume(self) -> None:
        self.paused = False
        self.resumed.set()
        if not self.draining.is_set():
            self.halted.clear()

    def drain(self) -> None:
        self.draining.set()
        self.resumed.set()
        self.halted.set()

    @property
    def policy(self) -> str:
        """For which of `policies` this actor works; "" for the run's own, or for all."""
        return self.config.policy

    @property
    def ledger(self) -> StreamKey:
        """The policy's."""
        return names.ledger_of(self.policy)

    def run_register(self, kind: type[T]) -> Register[T]:
        """The RUN register for records of `kind`."""
        return Register(self.bus, self.publisher, "run", kind)

    async def emit(self, kind: str, values: dict[str, object]) -> None:
        """Publishes a metric of this actor."""
        await metrics.emit(self.bus, self.identity.role, self.identity.instance, kind, values)


def _blobs(config: RootConfig, identity: Identity) -> BlobsConfig:
    """Only the head of several machines has stores."""
    if machine_of(config, identity.role, identity.instance) == HEAD:
        return config.blobs
    return config.blobs.model_copy(update={"access": "http"})
