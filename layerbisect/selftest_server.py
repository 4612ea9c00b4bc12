"""The rollout of a self-test as a real SGLang server, started on this machine and stopped again.

The server captures through layerbisect's own plugin, as a user's would. What is planted in it comes
by :mod:`layerbisect.planted_sglang`, another plugin, which only this server is shown.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from layerbisect.bisect.progress import Progress
from layerbisect.captures.errors import LayerBisectError
from layerbisect.captures.store import Capture
from layerbisect.demo import Planted
from layerbisect.demo_engines import ENGINES, Side
from layerbisect.planted_server import PlantedServer
from layerbisect.planted_sglang import FORMS, NO_LAYER, NOT_PLANTED
from layerbisect.selftest_engines import Bench, CannotPlant


@dataclass
class ServerBench(Bench):
    """A server for the rollout, transformers for the trainer."""

    server: PlantedServer | None = field(init=False, default=None)

    def open(self, news: Progress) -> None:
        """Start the server first: it measures how much memory is left for it."""
        news.start("starting SGLang", 1)
        server = PlantedServer(self.model, self.folder / "server", self.device, self.dtype)
        self.server = server
        server.start()
        super().open(news)

    def close(self) -> None:
        """Stop the server."""
        if self.server is not None:
            self.server.stop()

    def describe(self) -> str:
        """Say which engines are compared."""
        from importlib.metadata import version

        attention = ENGINES["trainer"][0]
        return f"SGLang {version('sglang')} against transformers, {attention} attention"

    def source(self, side: Side, number: int) -> Path | Capture:
        """What a side captured in a run; the server's runs are in one capture."""
        if side == "trainer":
            return super().source(side, number)
        return self._server.captured(f"{number:02}-*", side)

    def argument(self, side: Side, number: int) -> str:
        """The same as `layerbisect bisect` takes it."""
        if side == "trainer":
            return super().argument(side, number)
        return f"{shlex.quote(str(self._server.capture))} --rollout-requests '{number:02}-*'"

    def plant(self, name: str, layer: int, side: Side, number: int, news: Progress) -> Planted:
        """Plant a fault in one side while run ``number`` of that side is captured."""
        if side == "trainer":
            return super().plant(name, layer, side, number, news)
        if name not in FORMS:
            raise CannotPlant("it is not among the faults that a server can be given")
        self._server.plant(f"{name}:{layer}")
        try:
            self.capture(side, number, news)
            said = self._server.said()
        finally:
            self._server.plant("")
        if said.startswith(NOT_PLANTED):
            reason = said.removeprefix(NOT_PLANTED)
            raise CannotPlant(f"SGLang's model is built otherwise ({reason})")
        self.check_changed(side, number)
        operator, point, description = FORMS[name]
        at = None if name in NO_LAYER else layer
        where = point if at is None else f"layers.{at}.{point}"
        return Planted(name, description, at, operator, where, side)

    def capture(self, side: Side, number: int, news: Progress) -> None:
        """Run a side on all tokens, as it is at the moment."""
        if side == "trainer":
            super().capture(side, number, news)
            return
        news.start("asking the server", len(self.tokens))
        for done, one in enumerate(self.tokens):
            self._server.score(one.ids, f"{number:02}-{done}")
            news.advance(done + 1)

    @property
    def _server(self) -> PlantedServer:
        if self.server is None:
            raise LayerBisectError("the server is not started; open the bench first")
        return self.server
