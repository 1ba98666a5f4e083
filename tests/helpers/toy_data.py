"""Small datasets for tests: text folders, and their shards under the toy task."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from helpers.models.toy_task import ToyTask

from kftrain.config import Config
from kftrain.data.settings import DataConfig
from kftrain.data.shards.manifest import read_manifest, shard_uri
from kftrain.run.settings import RunConfig
from kftrain.sharding.shard_dataset import ShardingResult, shard_dataset


def text_folder(folder: Path, num_files: int = 40) -> Path:
    """Files `part/doc-000.txt` … of different lengths; about a fifth of them fall into validation at 0.2."""
    for number in range(num_files):
        path = folder / ("part" if number % 3 else ".") / f"doc-{number:03d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"document {number} " * (1 + number % 7))
    return folder


def toy_config(source: Path | str, root: Path | str, **data: object) -> Config:
    """A configuration for the toy task; shards are as small as the configuration allows."""
    settings = {"source": str(source), "shard_size_bytes": 1 << 16, "validation_fraction": 0.2, **data}
    return Config(run=RunConfig(storage_root=str(root)), data=DataConfig.model_validate(settings))


def shard_path(result: ShardingResult, split: str = "train", number: int = 0) -> Path:
    """Where a shard's tar lies."""
    return Path(shard_uri(result.manifest_uri, result.manifest.splits[split].shards[number]))


def shard_folder(manifest_uri: str) -> Path:
    """Where the shards of a dataset of one part lie."""
    (shard, *_) = read_manifest(manifest_uri).splits["train"].shards
    return Path(shard_uri(manifest_uri, shard)).parent


def flat_copy(manifest_uri: str, folder: Path) -> Path:
    """A copy of a dataset in which all files lie beside the manifest."""
    folder.mkdir()
    document = json.loads(Path(manifest_uri).read_text())
    for shard in (shard for split in document["splits"].values() for shard in split["shards"]):
        path = Path(manifest_uri).parent / shard["folder"] / shard["name"]
        for each in (path, path.with_suffix(".index.npy"), path.with_suffix(".blocks")):
            shutil.copyfile(each, folder / each.name)
        shard["folder"] = ""
    (folder / "manifest.json").write_text(json.dumps(document))
    return folder


def shard_toy(source: Path | str, root: Path | str, **data: object) -> ShardingResult:
    """Shards of a source under the toy task."""
    return shard_dataset(toy_config(source, root, **data), ToyTask(), lambda line: None)
