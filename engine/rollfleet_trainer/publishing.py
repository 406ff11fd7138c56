"""Publishes a checkpoint: a directory of safetensors files that readers refuse, or that is complete.

Written into a hidden working folder beside its place, which holds an unfinished manifest from the first moment on:

    folder; unfinished manifest (empty); shards; index and other files; manifest's content; its final name; the
    folder's final name

Each step is on disk before the next one begins. So whatever dies, and whatever of unsynced writes is lost then, leaves
a folder that is refused by the unfinished manifest's name, or one whose manifest names sizes and digests of all of it.
The rename of the folder makes it appear at once where the file system renames atomically; where it does not, or shows
other nodes an older listing, the manifest still tells. What NFS promises is said in docs/checkpoints.md.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollfleet_kernels.digest import TensorDigest, version_digest
from rollfleet_protocol.manifest import MANIFEST, MANIFEST_UNFINISHED, FileRecord, Manifest, encode
from rollfleet_trainer.checkpoints import INDEX, Published, manifest_of, published_as, relative_path
from rollfleet_trainer.errors import CheckpointExistsError, PublishError
from rollfleet_trainer.files import FILES, Files, read_small
from rollfleet_trainer.host import MOST_NAME, WRAPPERS, HostTensor, TensorError, host_tensor
from rollfleet_trainer.shards import SHARD_BYTES, ShardWriter, digest_of

Tensors = Mapping[str, Any] | Iterable[tuple[str, Any]] | Callable[[], Iterable[tuple[str, Any]]]
Progress = Callable[[int, int], None]  # tensors and bytes done so far

TAKEN = (
    "publish takes a mapping of names to tensors, a module of torch, pairs of both, or a callable that returns pairs"
)
LARGEST_ASSET = 64 << 20
# Weights in any form, and what tells where they are: never copied beside weights of another version.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack", ".h5", ".onnx", ".index.json")


def publish(
    root: Path | str,
    tensors: Tensors,
    *,
    step: str | int,
    within: str = "",
    name: str = "",
    assets: Path | str | None = None,
    shard_bytes: int = SHARD_BYTES,
    collective: bool = False,
    progress: Progress | None = None,
    files: Files = FILES,
) -> Published:
    """Write `tensors` as root/within/name, by default step-<step>. Blocks; for asyncio it is for a thread.

    tensors: names as the model's own checkpoint has them (Hugging Face's), to tensors of torch or numpy, of any device
        and stride; a dict, a module of torch, pairs that are made one by one, or a callable that returns some. Of a
        dict, names of the same memory (tied weights) are written once, under the first of them, as named_parameters()
        gives them. Beside the tensor at hand host.PIECE_BYTES of host memory are used, and all of a tensor of numpy
        whose elements do not follow each other.
    assets: a folder whose files that hold no weights (config.json, tokenizer) are copied. Engines of a fleet need none:
        they keep those of model.path.
    collective: making the pairs takes part in collectives: on a failure the rest of them is made all the same, so that
        the other ranks do not wait for ever.

    The same tensors under a name that is taken give what is there. Raises CheckpointExistsError for others,
    PublishError with file and cause (no space left, no permission), TensorError for names, dtypes and shapes that no
    engine would take, and what the pairs themselves raise.
    """
    root, tensors = Path(root), _as_pairs(tensors)
    pairs = iter(tensors.items() if isinstance(tensors, Mapping) else tensors)
    place = relative_path(within, name or f"step-{step}")
    publication = _Publication(
        root=root,
        place=place,
        step=str(step),
        assets=None if assets is None else Path(assets),
        shard_bytes=shard_bytes,
        held=isinstance(tensors, dict),
        progress=progress,
        files=files,
    )
    try:
        _require_assets(publication.assets)
        if isinstance(tensors, dict):
            _require_room(root, tensors)
        return publication.run(pairs)
    except OSError as error:
        raise _told(error, root / place) from error
    finally:
        if collective:
            deque(pairs, maxlen=0)


@dataclass
class _Publication:
    root: Path
    place: str
    step: str
    assets: Path | None
    shard_bytes: int
    held: bool  # all tensors exist at once; what is made one by one may come in memory that is used again
    progress: Progress | None
    files: Files
    tied: dict[str, str] = field(default_factory=dict)

    def run(self, pairs: Iterator[tuple[str, Any]]) -> Published:
        """Write it, or find that it is there."""
        started = time.monotonic()
        final = self.root / self.place
        there = manifest_of(final)
        if there is not None:
            return self._same(there, self._digest(pairs))
        if final.exists() and not (final.is_dir() and not any(final.iterdir())):
            raise CheckpointExistsError(f"{final}: is there, and is no complete checkpoint: remove it, or give name=")
        working = final.with_name(f".{final.name}.{uuid.uuid4().hex}.part")
        self.files.make_folder(working)
        try:
            manifest = self._write(working, pairs)
            manifest = self._put_in_place(working, final, manifest)
        except BaseException:
            with suppress(OSError):  # what is left is refused by every reader, and removed by retain()
                self.files.remove_tree(working)
            raise
        return published_as(self.root, self.place, manifest, time.monotonic() - started)

    def _same(self, there: Manifest, digest: str) -> Published:
        if there.digest != digest:
            told = f"{self.root / self.place}: holds step {there.step!r} with digest {there.digest}, not {digest}"
            raise CheckpointExistsError(f"{told}; it is never overwritten: give name=")
        return published_as(self.root, self.place, there)

    def _listed(self, pairs: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, HostTensor]]:
        """Checked, one by one; without those whose memory was written under another name."""
        seen: set[str] = set()
        places: dict[Any, str] = {}
        for name, tensor in map(_pair, pairs):
            _require_name(name, seen)
            seen.add(name)
            found = host_tensor(name, tensor)
            if self.held and (first := places.setdefault(found.place, name)) != name:
                self.tied[name] = first
                continue
            yield name, found

    def _digest(self, pairs: Iterator[tuple[str, Any]]) -> str:
        listed = self._listed(pairs)
        return version_digest(TensorDigest(name, each.dtype, each.shape, digest_of(each)) for name, each in listed)

    def _write(self, working: Path, pairs: Iterator[tuple[str, Any]]) -> Manifest:
        files = self.files
        unfinished = files.create(working / MANIFEST_UNFINISHED)
        try:
            files.sync(unfinished)
            files.sync_folder(working)
            writer, nbytes = self._write_shards(working, pairs)
            others = {} if self.assets is None else _copy_assets(self.assets, working, files)
            others[INDEX] = _write_file(working / INDEX, _index(writer, nbytes), files)
            files.sync_folder(working)
            manifest = Manifest(
                step=self.step,
                digest=version_digest(writer.digests),
                created_ns=time.time_ns(),
                nbytes=nbytes,
                shards=writer.shards,
                files=others,
                tensors=writer.tensors,
                tied=self.tied,
            )
            files.write(unfinished, memoryview(encode(manifest)), 0)
            files.sync(unfinished)
        finally:
            files.close(unfinished)
        files.rename(working / MANIFEST_UNFINISHED, working / MANIFEST)
        files.sync_folder(working)
        return manifest

    def _write_shards(self, working: Path, pairs: Iterator[tuple[str, Any]]) -> tuple[ShardWriter, int]:
        writer, nbytes = ShardWriter(working, self.files, self.shard_bytes), 0
        try:
            for name, tensor in self._listed(pairs):
                writer.add(name, tensor)
                nbytes += tensor.nbytes
                if self.progress is not None:
                    self.progress(len(writer.tensors), nbytes)
            writer.finish()
        except BaseException:
            writer.abandon()
            raise
        if not writer.tensors:
            raise TensorError("there is no tensor to publish")
        return writer, nbytes

    def _put_in_place(self, working: Path, final: Path, manifest: Manifest) -> Manifest:
        try:
            self.files.rename(working, final)
        except OSError:
            # Somebody else was first; or it was done, and its answer was lost on the way from the server.
            there = manifest_of(final)
            if there is None:
                raise
            self._same(there, manifest.digest)
            manifest = there
            with suppress(OSError):
                self.files.remove_tree(working)
        self.files.sync_folder(final.parent)
        return manifest


def _as_pairs(given: Any) -> Mapping[str, Any] | Iterable[tuple[str, Any]]:
    """A dict where all tensors exist at once. TensorError where none can come of it."""
    if isinstance(given, Mapping):
        return given
    found = None
    if not isinstance(given, str | bytes | type):
        if callable(getattr(given, "named_parameters", None)):
            return dict(given.named_parameters())
        found = given() if callable(given) else given
    if not isinstance(found, Iterable):
        raise TensorError(f"a {type(given).__name__} gives no tensors: {TAKEN}")
    return found


def _pair(found: Any) -> tuple[Any, Any]:
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise TensorError(f"a {type(found).__name__} is no pair of name and tensor: {TAKEN}")
    return found[0], found[1]


def _require_name(name: object, seen: set[str]) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= MOST_NAME or name == "__metadata__":
        raise TensorError(f"tensor {name!r:.80}: a name is a text of 1 to {MOST_NAME} characters")
    if not name.isprintable():
        raise TensorError(f"tensor {name!r}: has characters that cannot be shown")
    wrapper = next((each for each in WRAPPERS if each in name), None)
    if wrapper is not None:
        raise TensorError(f"tensor {name}: the model does not know {wrapper!r}: take it out of the names")
    if name in seen:
        raise TensorError(f"tensor {name}: comes twice")


def _require_assets(folder: Path | None) -> None:
    """Before anything is written: what copies them comes last."""
    if folder is not None and not folder.is_dir():
        raise PublishError(f"assets={folder}: is no folder: nothing was published; without assets= only weights are")


def _require_room(root: Path, tensors: dict[str, Any]) -> None:
    """Where all sizes are known beforehand. File systems that tell no size of theirs are not asked."""
    places = {found.place: found.nbytes for name, tensor in tensors.items() if (found := host_tensor(name, tensor))}
    wanted = sum(places.values())
    root.mkdir(parents=True, exist_ok=True)
    told = os.statvfs(root)
    free = told.f_bavail * told.f_frsize
    if told.f_blocks and free < wanted:
        raise PublishError(f"{root}: {wanted} bytes are to be written, {free} are free: see retain(), or enlarge it")


def _index(writer: ShardWriter, nbytes: int) -> bytes:
    """As Hugging Face's libraries and vLLM read it."""
    weight_map = {name: tensor.shard for name, tensor in writer.tensors.items()}
    return json.dumps({"metadata": {"total_size": nbytes}, "weight_map": weight_map}, indent=2).encode()


def _write_file(path: Path, data: bytes, files: Files) -> FileRecord:
    fd = files.create(path)
    try:
        files.write(fd, memoryview(data), 0)
        files.sync(fd)
    finally:
        files.close(fd)
    return FileRecord(size=len(data), sha256=hashlib.sha256(data).hexdigest())


def _copy_assets(source: Path, working: Path, files: Files) -> dict[str, FileRecord]:
    found: dict[str, FileRecord] = {}
    for path in sorted(source.iterdir()):
        name = path.name
        if not path.is_file() or name.endswith(_WEIGHTS) or name.startswith(".") or name == MANIFEST:
            continue
        data = read_small(path, LARGEST_ASSET)
        if len(data) > LARGEST_ASSET:
            size = path.stat().st_size
            raise PublishError(f"{path}: has {size} bytes, files beside the weights have at most {LARGEST_ASSET}")
        found[name] = _write_file(working / name, data, files)
    return found


def _told(error: OSError, place: Path) -> PublishError:
    where = error.filename or place
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return PublishError(f"{place}: {error.strerror}: nothing was published; see retain(), or enlarge the volume")
    return PublishError(f"{place}: nothing was published: {where}: {error.strerror}")
