"""The ranks of a sharded target on this machine, for `evaluate --tp N`: this process is the first, and starts the rest.

All of them load their part as a target rank of a run does (`recipe.target.open`), and the others follow the first one's
calls (`recipe.decode.sharded`). If one of them dies, this process says so and ends too; they end with this process.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from recipe.decode.sharded import ShardedTarget, follow, leading_target
from recipe.errors import ConfigError, RunError
from recipe.model_files.shapes import TargetShape
from recipe.process import die_with_parent

PATIENCE_S = 8.0  # for this process to notice a dead rank by itself, which inside an NCCL call it cannot
LEAVE_S = 30.0


@dataclass(frozen=True)
class Place:
    """What a rank has to know. ``folder`` is where the ranks meet and leave their logs, ``dtype`` a name of torch's."""

    folder: str
    target: str
    rank: int
    tp: int
    device: str
    dtype: str
    taps: tuple[int, ...]
    threads: int
    exact_sums: bool

    @property
    def own_device(self) -> torch.device:
        return torch.device("cuda", self.rank) if self.device == "cuda" else torch.device("cpu")


@contextmanager
def sharded_target(
    folder: Path,
    shape: TargetShape,
    tp: int,
    taps: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    exact_sums: bool = False,
) -> Iterator[tuple[ShardedTarget, torch.Tensor]]:
    """The target in ``folder`` over ``tp`` ranks, and its embedding [V, H] on the first rank's device.

    ``exact_sums``: no sum is split over ranks, as `dflash.target.exact_sums` does in training.

    Raises ConfigError for a target that cannot be cut like this, RunError when another rank dies.
    """
    from recipe.engine.worlds import leave_world, share_from_first
    from recipe.model_files.weights import Checkpoint

    with tempfile.TemporaryDirectory(prefix="dflash-evaluate-") as meeting:
        threads = max(1, (os.cpu_count() or 1) // tp)
        kind = str(dtype).removeprefix("torch.")
        place = Place(meeting, str(folder), 0, tp, device.type, kind, tuple(taps), threads, exact_sums)
        before, own_threads = dict(os.environ), torch.get_num_threads()
        ranks = OtherRanks(place)
        try:
            engine = _load(place, shape)
            vocabulary = shape.vocab_size
            target, embedding = leading_target(
                engine, Checkpoint(str(folder)), vocabulary, place.own_device, share_from_first
            )
            yield target, embedding
            ranks.may_end()
            target.leave()
            leave_world()
            ranks.join()
        except RuntimeError as error:  # a collective whose other end has gone
            raise ranks.failure(PATIENCE_S) or error from None
        finally:
            ranks.kill()
            if device.type == "cpu":
                leave_world()
            torch.set_num_threads(own_threads)
            for name in set(os.environ) - set(before):
                del os.environ[name]
            os.environ.update(before)


def _load(place: Place, shape: TargetShape) -> nn.Module:
    """Join the world and load this rank's part."""
    from transformers.utils import logging

    from recipe.engine.local_world import join_local_world

    logging.set_verbosity_error()  # its notes on missing kernels are no news here: cpu_kernels.py decides that
    torch.set_num_threads(place.threads)
    device = place.own_device
    join_local_world(Path(place.folder), place.rank, place.tp, device)
    from recipe.engine.worlds import world_group
    from recipe.target.open import open_target

    dtype = getattr(torch, place.dtype)
    return open_target(
        place.target,
        shape,
        place.tp,
        place.rank,
        world_group(),
        device,
        dtype,
        place.taps,
        need_last_hidden=True,
        exact_sums=place.exact_sums,
    )


class OtherRanks:
    """The processes of rank 1 and up, watched by a thread until they `may_end`."""

    def __init__(self, place: Place) -> None:
        self.folder, self._over = Path(place.folder), threading.Event()
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(place.threads)}
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        for rank in range(1, place.tp):
            command = [sys.executable, "-m", __name__, json.dumps(asdict(replace(place, rank=rank)))]
            with self._log(rank).open("wb") as log:
                self.processes[rank] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        threading.Thread(target=self._watch, daemon=True).start()

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def failure(self, wait_s: float = 0.0) -> Exception | None:
        """Why another rank has ended: the user's mistake that it found, or its last words. None when all live."""
        for rank, process in self.processes.items():
            try:
                code = process.wait(wait_s)
            except subprocess.TimeoutExpired:
                continue
            if code == 0:
                continue
            mistake = self.folder / f"rank{rank}.json"
            if mistake.is_file():
                return ConfigError(*json.loads(mistake.read_text()))
            said = self._log(rank).read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
            return RunError(f"rank {rank} of the target ended with exit code {code}: {said[0][:300]}")
        return None

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            if all(process.poll() in (None, 0) for process in self.processes.values()):
                continue
            if self._over.wait(PATIENCE_S):
                return
            found = self.failure()
            self.kill()
            shutil.rmtree(self.folder, ignore_errors=True)
            print(f"error: {found}", file=sys.stderr, flush=True)
            os._exit(2 if isinstance(found, ConfigError) else 1)

    def may_end(self) -> None:
        """From here on an end is no failure."""
        self._over.set()

    def join(self) -> None:
        for rank, process in self.processes.items():
            try:
                process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                print(f"rank {rank} of the target did not leave and is ended", file=sys.stderr)

    def kill(self) -> None:
        self._over.set()
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()


def main(argument: str) -> int:
    """One of the other ranks."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the first rank, which ends the others
    told = json.loads(argument)
    place = Place(**{**told, "taps": tuple(told["taps"])})
    try:
        engine = _load(place, TargetShape.resolve(place.target))
    except ConfigError as error:
        facts = [error.field, str(error.value), error.rule, error.fix]
        (Path(place.folder) / f"rank{place.rank}.json").write_text(json.dumps(facts))
        return 2
    from recipe.engine.worlds import leave_world, share_from_first
    from recipe.target.capture import decoder_of

    follow(decoder_of(engine), place.own_device, share_from_first)
    leave_world()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
