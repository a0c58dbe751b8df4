"""One running sidecar: its folder's lock, its socket, its thread. Used by two verbs."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from blasst.kernels.exchange.desired import DesiredStateError
from blasst.kernels.exchange.prometheus import PagesCollector
from blasst.kernels.exchange.stats import remove_dead
from blasst.server import observe
from blasst.server.app import Parts, create_app
from blasst.server.canary import Canary
from blasst.server.canary_plan import load_plan
from blasst.server.connections import HEADER_BYTES, Connection
from blasst.server.control import ControlService
from blasst.server.follow import Follower
from blasst.server.settings import Settings, SettingsError, check_url, prepare_state_dir
from blasst.server.sweep import Sweeper
from blasst.server.traces import Traces
from blasst.server.upstream import Upstream

_STOP_S = 5


@dataclass
class Sidecar:
    """`prepare` takes everything that can be refused, `start` serves, `stop` gives it all back."""

    settings: Settings
    control: ControlService = field(init=False)
    _collector: PagesCollector = field(init=False)
    _socket: socket.socket | None = None
    _bound: Path | None = None
    _follower: Follower | None = None
    _canary: Canary | None = None
    _traces: Traces | None = None
    _sweeper: Sweeper | None = None
    _server: uvicorn.Server | None = None
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._collector = PagesCollector(
            self.settings.stats_dir, desired_generation=self._desired_generation
        )
        cache = self._collector.cache
        self.control = ControlService(
            self.settings.state_dir,
            lambda: observe.highest_generation(cache.pages()),
            lambda: observe.refusal(cache.pages()),
        )

    @property
    def url(self) -> str:
        assert self._socket is not None
        if self.settings.uds is not None:
            return f"unix://{self.settings.uds.absolute()}"
        host, port = self._socket.getsockname()[:2]
        scheme = "https" if self.settings.tls_cert is not None else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def prepare(self, *, dead_pages_older_than_s: float) -> None:
        """Raises SettingsError: folder unusable or taken, token file unusable, port taken."""
        # The folder last: what is refused before it leaves no empty one behind.
        settings = self.settings
        settings.check_tls()
        app = create_app(settings, self.control, self._collector, parts=self._parts())
        self._socket = (
            listen(settings.host, settings.port)
            if settings.uds is None
            else listen_unix(settings.uds)
        )
        self._bound = settings.uds
        prepare_state_dir(settings.state_dir)
        self.control.open()
        if settings.follow is not None:
            self._follower = Follower(
                settings.follow, self.control, keep_raised=settings.canary is not None
            )
        remove_dead(settings.stats_dir, dead_pages_older_than_s)
        self._sweeper = Sweeper(self._collector.cache)
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                ssl_certfile=settings.tls_cert,
                ssl_keyfile=settings.tls_key,
                h11_max_incomplete_event_size=HEADER_BYTES,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                lifespan="off",
                timeout_keep_alive=15,
                timeout_graceful_shutdown=2,
            )
        )

    def start(self) -> None:
        """Serve in a thread; returns when requests are answered."""
        assert self._server is not None
        if self._follower is not None:
            self._follower.start()
        if self._sweeper is not None:
            self._sweeper.start()
        if self._canary is not None:
            self._canary.start()
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="sidecar", daemon=True
        )
        self._thread.start()
        while not self._server.started and self.running:
            time.sleep(0.01)

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """Safe to call at any stage, and twice."""
        for part in (self._follower, self._canary, self._sweeper):
            if part is not None:
                part.stop()
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(_STOP_S)
        if self._socket is not None:
            self._socket.close()
        if self._bound is not None:
            self._bound.unlink(missing_ok=True)
            self._bound = None
        self.control.close()
        if self._traces is not None:
            self._traces.stop()
            self._traces = None

    def _parts(self) -> Parts:
        """Raises SettingsError: a plan or a package that is missing."""
        settings, pages = self.settings, self._collector.cache.pages
        if settings.otlp_endpoint:
            self._traces = Traces.to(settings.otlp_endpoint)
        if settings.canary is not None:
            self._canary = Canary(
                load_plan(settings.canary, settings.engine_url),
                self.control,
                lambda generation: observe.follows(pages(), generation),
                lambda: observe.engine_min_context(pages()),
                self._traces,
            )
        upstream = None
        if settings.vllm_metrics:
            upstream = Upstream(check_url(settings.engine_url, "--engine-url"), self.control.tally)
        return Parts(self._follow_error, self._canary, upstream, self._traces)

    def _follow_error(self) -> str:
        return "" if self._follower is None else self._follower.error

    def _desired_generation(self) -> int | None:
        try:
            return self.control.read().generation
        except DesiredStateError:
            return None


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises SettingsError: the port is taken, the address not ours."""
    try:
        infos = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as e:
        raise SettingsError(f"host {host!r} cannot be resolved: {e.strerror}") from e
    family, kind, protocol, _, address = infos[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as e:
        listener.close()
        raise SettingsError(
            f"cannot listen on {host}:{port}: {e.strerror}; choose another port"
        ) from e
    return listener


def listen_unix(path: Path) -> socket.socket:
    """A listening Unix socket that its owner alone can open. Raises SettingsError: taken, no such
    folder. One that nobody listens on any more, of a killed sidecar, is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            _remove_stale(path)
        # Bound before it listens: nobody gets in between the two steps.
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(128)
    except OSError as e:
        listener.close()
        raise SettingsError(
            f"cannot listen on {path}: {e.strerror or e}; choose another --uds"
        ) from e
    return listener


def _remove_stale(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
