"""The process of a rank other than 0: it loads its part of a model and runs the plans that rank 0 sends."""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from multiprocessing.connection import Connection

from plait.checkpoint.weights import Target
from plait.config import EngineConfig
from plait.engine.device import choose_device, memory_of, open_device
from plait.errors import EngineError, PlaitError, clip_text
from plait.loading.adapters.place import AdapterLoader, place_adapters
from plait.loading.kernel_trials.trials import try_kernels
from plait.loading.make_runner import make_runner, make_sampler
from plait.loading.measure_memory import list_steps, measure_room
from plait.loading.open_model import load_decoder, weight_formats
from plait.loading.probe_scorer import open_settled
from plait.loading.target import agreement_of, find_cuts, find_used_ops, make_target, take_verdicts
from plait.model.decoder import Decoder
from plait.partition import Rank
from plait.resource_limits import trim_heap
from plait.runner.ranks.messages import (
    AdapterLoaded,
    ClearAdapter,
    Failed,
    FromLeader,
    Join,
    Joined,
    Leave,
    LoadAdapter,
    MeasureMemory,
    MemoryMeasured,
    Prepare,
    RankGpu,
    RankLoaded,
    Score,
    Step,
    Stepped,
    digest_of,
    encode,
    receive_command,
)
from plait.runner.ranks.processes import show_signs
from plait.runner.runner import ModelRunner
from plait.schedule.plan import Ticket

IDLE_S = 1.0  # without a command, after which memory is given back
SOON_S = 0.005  # in which a step comes that follows one that runs, if any does


def main(socket_fd: int, alive_fd: int) -> None:
    """Be a rank until rank 0 says `Leave`, or has gone."""
    threading.Thread(target=_watch, args=(alive_fd,), name="plait-alive", daemon=True).start()
    connection = Connection(socket_fd)
    try:
        join, _ = receive_command(connection)
        if not isinstance(join, Join):
            raise EngineError("the first message to a rank must be Join")
        Follower(join, connection).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # rank 0 has gone
    except Exception as error:
        kind = "" if isinstance(error, PlaitError) else f"{type(error).__name__}: "
        connection.send_bytes(encode(Failed(kind + " ".join(str(error).split())[:500])))
        os._exit(1)  # what other ranks wait for, never comes: threads of the group must not hold this process


def _watch(alive_fd: int) -> None:
    """End this process with rank 0's."""
    show_signs(socket.socket(fileno=alive_fd))
    os._exit(0)


class Follower:
    """One rank. Raises what loading and steps raise; nothing is of use after that."""

    def __init__(self, join: Join, connection: Connection) -> None:
        self._connection = connection
        rank = Rank(join.index, join.size, join.shares, join.block, join.whole_experts)
        opened = open_settled(join.model, join.config, _silent)
        device, _ = choose_device(join.config.device, join.index, join.size)
        open_device(device)
        connection.send_bytes(encode(Joined()))  # what is wrong up to here, others need not wait for
        cuts = find_cuts(opened, rank, join.meeting, device)
        self._target: Target = make_target(opened, device, cuts=cuts)
        if device.type == "cuda":  # each device has verdicts of its own; ranks that bind other kernels differ
            formats, used = weight_formats(opened), find_used_ops(opened)
            chip = try_kernels(self._target, formats, join.config.cache_dir, _silent, used)
            take_verdicts(self._target, chip)
        named = place_adapters(opened, self._target)
        self._decoder: Decoder = load_decoder(opened, self._target, _silent)
        self._adapters = AdapterLoader(opened, self._target, named)
        self._runner: ModelRunner | None = None
        self._running = deque[tuple[int, bytes, Ticket]]()  # steps, the oldest first
        agreement = agreement_of(opened, rank)
        gpu = RankGpu.of(self._target.chip)
        self._connection.send_bytes(encode(RankLoaded(agreement, self._target.weights_nbytes, gpu)))

    def run(self) -> None:
        """Serve rank 0. Raises EOFError or OSError when it has gone.

        A step is launched, as there, while the one before it runs: else all GPUs would wait for this rank's
        host between two steps.
        """
        while True:
            command, data = self._next()
            match command:
                case Prepare():
                    self._prepare(command)
                case Step(number, plan, sampling):
                    ticket = self._ready.launch(plan, sampling)
                    self._running.append((number, data, ticket))
                    self._settle(1 if ticket.can_be_followed else 0)
                case Score(token_ids, chunk_size):
                    self._ready.logits(token_ids, chunk_size)
                case MeasureMemory(config, max_model_len):
                    self._connection.send_bytes(encode(MemoryMeasured(self._measure(config, max_model_len))))
                case LoadAdapter(slot, path):
                    self._connection.send_bytes(encode(self._load_adapter(slot, path)))
                case ClearAdapter(slot):
                    self._adapters.clear(slot)
                case Leave():
                    os._exit(0)
                case Join():
                    raise EngineError("a rank got Join twice")

    def _next(self) -> tuple[FromLeader, bytes]:
        """The next command and its bytes. If it is no step that comes at once, none runs any more."""
        if self._running and not self._connection.poll(SOON_S):
            self._settle(0)
        if not self._running and not self._connection.poll(IDLE_S):
            trim_heap()  # of what steps have freed, which the C library keeps
        command, data = receive_command(self._connection)
        if not isinstance(command, Step):
            self._settle(0)
        return command, data

    def _settle(self, most: int) -> None:
        """Wait for steps, and report what they sampled, until at most so many run."""
        while len(self._running) > most:
            number, data, ticket = self._running.popleft()
            self._connection.send_bytes(encode(Stepped(number, digest_of(data, ticket.wait()))))

    @property
    def _ready(self) -> ModelRunner:
        if self._runner is None:
            raise EngineError("a rank got a step before its memory")
        return self._runner

    def _measure(self, config: EngineConfig, max_model_len: int) -> int:
        device, dtype = self._target.device, self._target.dtype
        runs = list_steps(self._decoder, config, max_model_len, device, dtype)
        return measure_room(memory_of(device), *runs)

    def _load_adapter(self, slot: int, path: str) -> AdapterLoaded:
        """What is wrong with an adapter is its sender's fault, which ends nothing."""
        try:
            return AdapterLoaded(self._adapters.load(slot, path))
        except (PlaitError, OSError) as error:
            return AdapterLoaded("", clip_text(" ".join(str(error).split()), 500))

    def _prepare(self, message: Prepare) -> None:
        target, vocab_size = self._target, self._decoder.spec.vocab_size
        sampler = make_sampler(target, vocab_size, message.banned)
        self._runner = None
        self._runner = make_runner(self._decoder, sampler, target, message.config, message)
        sampler.prepare()


def _silent(what: str, done: int, total: int) -> None:
    """Report no progress."""
