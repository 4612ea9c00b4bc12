"""Run steps on the real megatron-core: one process a rank, on this machine's CPU, over gloo.

A job is a dict: ``model`` (a checkpoint directory), ``config`` (fields of TransformerConfig to
change, if any) and ``steps``, done in order in one life of the processes, as importing megatron
costs seconds. A step names in ``do`` what is done: a key of `STEPS`, or ``module:function``.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.megatron_model import Layout, build, forward, stand_ins, start

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).parents[1]
TIMEOUT = 300.0
"""Seconds that a job may take."""

CAPTURE_OPTIONS = ("points", "label", "names", "salts", "vocab", "routes", "route_weights", "only")


class JobError(RuntimeError):
    """Ranks failed, or took too long; the message has what each of them said."""


@dataclass(frozen=True)
class Rank:
    """What a step gets: one process's part of the model."""

    chunks: list[Any]
    layout: Layout
    model: Path

    @property
    def number(self) -> int:
        """Rank in the whole job."""
        import torch

        return torch.distributed.get_rank()


def run_job(
    job: Path | dict[str, Any], layout: Layout | None = None, *, timeout: float = TIMEOUT
) -> list[list[Any]]:
    """Start the ranks of ``layout``, let each do the job's steps, and end them.

    Returns:
        what each step returned, as JSON holds it, by rank and by step.

    Raises:
        JobError: a rank failed, with the traceback of each that did, or time ran out; no rank is
            left running.
    """
    layout = layout or Layout()
    given = json.loads(job.read_text()) if isinstance(job, Path) else job
    with tempfile.TemporaryDirectory(prefix="megatron-job-") as scratch:
        folder = Path(scratch)
        (folder / "job.json").write_text(json.dumps(given | {"layout": asdict(layout)}))
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with subprocess.Popen(
            [sys.executable, "-m", "scripts.megatron_engine", scratch],
            # megatron's warnings, on what is not installed, would bury a failure's traceback
            env=os.environ | dict(PYTHONPATH=path, PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as launcher:
            try:
                _, said = launcher.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                said = f"no end after {timeout:g} s"
            finally:
                # the launcher's session is the ranks' too
                with suppress(ProcessLookupError):
                    os.killpg(launcher.pid, signal.SIGKILL)
        if launcher.returncode:
            raise JobError("\n".join((said, *_complaints(folder, layout.ranks))))
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(layout.ranks)]


def _complaints(folder: Path, ranks: int) -> list[str]:
    """The last lines of each rank's log."""
    logs = {rank: folder / f"{rank}.log" for rank in range(ranks)}
    return [
        f"rank {rank}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        for rank, log in logs.items()
        if log.exists() and log.stat().st_size
    ]


def do_forward(rank: Rank, step: dict[str, Any]) -> list[list[float]] | None:
    """Run sequences forward, and score them.

    The step's ``tokens`` are the sequences (or a JSON file of them), dealt out to the data-parallel
    ranks in turn, ``micro_batch`` at a time (default: all in one). ``fault`` is planted meanwhile
    (see tests/planted_megatron.py); ``capture`` is a directory for a capture, with the options in
    `CAPTURE_OPTIONS`; ``logprobs`` is a file that the result is written to as JSON as well.

    Returns:
        on rank 0, for each sequence the log-prob (nat) of every token but the first. Rows that pad
        the vocabulary count, as they do in megatron's own cross-entropy, which is what is used.
    """
    import torch
    from megatron.core import parallel_state

    tokens = step["tokens"]
    sequences = json.loads(Path(tokens).read_text()) if isinstance(tokens, str) else tokens
    replica = parallel_state.get_data_parallel_rank()
    replicas = parallel_state.get_data_parallel_world_size()
    if len(sequences) % replicas:
        raise ValueError(f"give a multiple of {replicas} sequences, not {len(sequences)}")
    own = range(replica, len(sequences), replicas)
    size = step.get("micro_batch") or len(own)
    batches = [[sequences[n] for n in own[i : i + size]] for i in range(0, len(own), size)]
    with ExitStack() as stack:
        if step.get("fault"):
            from tests.planted_megatron import plant

            stack.enter_context(plant(rank.chunks, step["fault"]))
        if step.get("capture"):
            import layerbisect

            options = {name: step[name] for name in CAPTURE_OPTIONS if name in step}
            stack.enter_context(layerbisect.capture(rank.chunks, step["capture"], **options))
        # replicas may share experts
        longest = max(map(len, sequences)) if replicas > 1 else 0
        logits = forward(rank.chunks, batches, longest)
    scores: dict[int, list[float]] = {}
    for batch, of_batch in zip(range(0, len(own), size), logits, strict=False):
        for row, number in enumerate(own[batch : batch + size]):
            ids = torch.tensor(sequences[number])
            scores[number] = log_probs(of_batch[row, : len(ids) - 1], ids[1:]).tolist()
    return _merged(rank, scores, len(sequences), step.get("logprobs"))


def log_probs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Log-probs of targets [n] from this rank's vocabulary shard of logits [n, V/tp], in nat."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    # it wants [s, b, V/tp], and works in place
    loss: torch.Tensor = vocab_parallel_cross_entropy(logits[:, None].clone(), targets[:, None])
    return -loss[:, 0]


def _merged(
    rank: Rank, scores: dict[int, list[float]], count: int, file: str | None
) -> list[list[float]] | None:
    """Bring what the last stages scored to rank 0, and write it to ``file`` if one is named."""
    import torch

    gathered: list[dict[int, list[float]]] = [{}] * rank.layout.ranks
    torch.distributed.all_gather_object(gathered, scores)
    if rank.number:
        return None
    everything = {number: value for part in gathered for number, value in part.items()}
    merged = [everything[number] for number in range(count)]
    if file:
        Path(file).write_text(json.dumps(merged))
    return merged


STEPS: dict[str, Callable[[Rank, dict[str, Any]], Any]] = {"forward": do_forward}


def _launch(folder: Path) -> str:
    """Fork the ranks and wait for them: so that megatron is imported once, not once a rank.

    Returns:
        what went wrong, the ranks that still ran having been killed; "" where all ended well.
    """
    stand_ins()
    import megatron.core.models.gpt  # noqa: F401

    job = json.loads((folder / "job.json").read_text())
    layout = Layout(**job["layout"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= dict(
        WORLD_SIZE=str(layout.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    caller = os.getppid()
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_rank, args=(folder, job, n)) for n in range(layout.ranks)]
    try:
        for rank in ranks:
            rank.start()
        while running := [rank.sentinel for rank in ranks if rank.is_alive()]:
            multiprocessing.connection.wait(running, timeout=1)
            failed = [n for n, rank in enumerate(ranks) if rank.exitcode]
            if failed:
                # the others find out that it is gone, and say so
                time.sleep(0.5)
                return f"rank {', '.join(map(str, failed))} failed"
            if os.getppid() != caller:
                return "the caller is gone"
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
    return ""


def _rank(folder: Path, job: dict[str, Any], number: int) -> None:
    """Do the job of ``folder`` as one of its ranks."""
    with (folder / f"{number}.log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ["RANK"] = str(number)
    import torch

    layout = Layout(**job["layout"])
    start(layout)
    model = Path(job["model"])
    rank = Rank(build(model, layout, **job.get("config", {})), layout, model)
    results = []
    for step in job["steps"]:
        name = step["do"]
        module, _, function = name.partition(":")
        do = getattr(importlib.import_module(module), function) if function else STEPS[name]
        results.append(do(rank, step))
    (folder / f"{number}.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(_launch(Path(sys.argv[1])) or None)
