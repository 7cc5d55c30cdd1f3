"""An object store in memory in which any one write or removal fails, by an error or by the end of the process."""

from __future__ import annotations

from typing import Any

from fsspec.implementations.memory import MemoryFile, MemoryFileSystem


class Death(BaseException):
    """The process ends here: nobody cleans up."""


class FailingFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec is not typed
    """Memory in which operation `fails_at` (counted from 0) raises `error`; of a write the first half is there then."""

    protocol = "failing"
    blocksize = 400
    """A file is written in blocks of so many bytes."""
    cachable = False
    fails_at: int | None = None
    error: type[BaseException] = OSError
    done = 0

    @classmethod
    def arm(cls, fails_at: int | None, error: type[BaseException] = OSError) -> None:
        cls.fails_at, cls.error, cls.done = fails_at, error, 0

    @classmethod
    def fails(cls) -> bool:
        cls.done += 1
        return cls.done - 1 == cls.fails_at

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace("failing://", "memory://")))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        made = super()._open(path, mode, **options)
        return Writing(made) if mode == "wb" else made

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        cut = self.fails()
        super().pipe_file(path, value[: len(value) // 2] if cut else value, mode=mode, **options)
        if cut:
            raise self.error

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """An object store has no folders."""

    def rm_file(self, path: str) -> None:
        if self.fails():
            raise self.error
        self._rm(path)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        """As a store does it: one object after another."""
        for one in self.find(path):
            if self.fails():
                raise self.error
            self._rm(one)


class Writing:
    """A file of it: what was written stays, whatever happens next."""

    def __init__(self, file: MemoryFile) -> None:
        self._file = file

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()

    def write(self, block: bytes) -> int:
        cut = FailingFileSystem.fails()
        self._file.write(block[: len(block) // 2] if cut else block)
        if cut:
            raise FailingFileSystem.error
        return len(block)
