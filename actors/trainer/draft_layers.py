"""Draft layers (multi-token prediction): layers of a Hugging Face folder past those that `num_hidden_layers` counts.

Invariant: they are not trained, and never lost: every export has them as the start model's folder has them, so that it is
whole, and engines that draft with them find them. What they draft is checked against the trained model; as it moves away from
the start model they guess less often right.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig

from physarum.actors.trainer.errors import UnsupportedModel
from physarum.weightsync.quantisation.plan import Quantisation
from physarum.weightsync.quantisation.reading import Dequantised

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_INDEX = "model.safetensors.index.json"


class DraftLayers:
    """Of one folder, which must stay as it is. Raises UnsupportedModel where it cannot be read."""

    def __init__(self, folder: Path, config: PretrainedConfig) -> None:
        self._first = config.num_hidden_layers
        try:
            files = {name: path for path, names in _names(folder).items() for name in self._drafts(path, names)}
            self._files = dict(sorted(files.items()))
            self._quantisation = Quantisation.in_folder(folder) if files else None
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise UnsupportedModel(f"model folder {folder}: weights are missing or unreadable ({error})") from error

    def tensors(self, first: int = 0, step: int = 1) -> Iterator[tuple[str, Tensor]]:
        """Every `step`-th from the `first` on, in order of their names; those that are stored quantised as they were before.

        Read anew each time, one after another: they may be larger than what there is room for.
        """
        stored = Dequantised(self._quantisation, self._files.keys(), self._load)
        names = list(dict.fromkeys(map(self._unquantised, self._files)))
        for name in names[first::step]:
            yield name, stored.weight(name)

    def _unquantised(self, name: str) -> str:
        """The weight of which a stored tensor is a part."""
        return name if self._quantisation is None else self._quantisation.weight_of(name)

    def _load(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as file:
            return file.get_tensor(name)

    def _drafts(self, path: Path, names: Sequence[str] | None) -> list[str]:
        if names is None:
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
        found = ((name, _LAYER.match(name)) for name in names)
        return [name for name, match in found if match is not None and int(match[1]) >= self._first]


def _names(folder: Path) -> dict[Path, list[str] | None]:
    """The folder's safetensors files and what the index says is in each; None where there is no index."""
    if not (folder / _INDEX).exists():
        return dict.fromkeys(sorted(folder.glob("*.safetensors")))
    files: dict[Path, list[str] | None] = {}
    for name, file in json.loads((folder / _INDEX).read_text())["weight_map"].items():
        names = files.setdefault(folder / file, [])
        assert names is not None
        names.append(name)
    return files
