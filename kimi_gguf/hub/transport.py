"""Exact ranges of files on the Hub, over the library's own HTTP client.

A large file's address leads to another host by a redirect that is signed and soon expires. It is followed here, not
by the client: the token stays with the Hub, the signed address is used again for the next range of the file, and a
new one is asked for when it has expired.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event, Lock
from urllib.parse import urljoin, urlsplit

import httpx2
from huggingface_hub import constants, get_session, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from convert.version import VERSION
from kimi_gguf.hub.faults import Transient, refusal, transport_fault
from kimi_gguf.hub.retry import Note, Patience, Stopped, asked_wait
from quant.errors import InputError

TRIES = 6
# A long job outlives a Hub that is away for ten minutes.
PATIENT_TRIES = 16
CONNECTIONS = 8
SEGMENT_BYTES = 8 << 20
_REDIRECTS = 5
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_EXPIRED = frozenset({400, 401, 403, 410})
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_HUB_HOSTS = ("https://huggingface.co", "https://hf.co")

Sink = Callable[[bytes | bytearray], object]


def silent(text: str) -> None:
    """Notes that nobody asked for."""


def hub_headers() -> dict[str, str]:
    """Headers of a request to the Hub, with the user's token if there is one."""
    return build_hf_headers(library_name="kimi-gguf", library_version=VERSION)


class Transport:
    """Reads files of one commit of one repository; its methods may be called from several threads.

    Args:
        repo: ``owner/name``.
        commit: 40 hexadecimal digits.
        stop: set to call off whatever is under way.
        note: told of waits.
    """

    def __init__(self, repo: str, commit: str, *, stop: Event | None = None, note: Note = silent) -> None:
        self.repo = repo
        self.commit = commit
        self.stop = stop or Event()
        self.note = note
        self._signed: dict[str, str] = {}
        self._lock = Lock()

    def read(self, path: str, begin: int, end: int, size: int) -> bytes:
        """Bytes [begin, end) of the file at ``path``, which has ``size`` bytes; asked for exactly.

        Raises:
            InputError: the Hub refuses, or fails too often.
        """
        return bytes(self._segment(path, begin, end, size, TRIES))

    def copy(self, path: str, begin: int, end: int, size: int, sink: Sink) -> None:
        """Hand bytes [begin, end) of a file to ``sink`` in order, from the calling thread.

        A long stretch comes over several connections, a segment each, so that memory is connections times segment.
        A broken answer is continued where it broke.

        Raises:
            InputError: as ``read``.
            Stopped: called off.
        """
        if end - begin <= SEGMENT_BYTES:
            self._copy(path, begin, end, size, PATIENT_TRIES, sink)
            return
        with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="fetch") as pool:
            coming: deque[Future[bytearray]] = deque()
            try:
                for at in range(begin, end, SEGMENT_BYTES):
                    if len(coming) == CONNECTIONS:
                        sink(coming.popleft().result())
                    stop = min(at + SEGMENT_BYTES, end)
                    coming.append(pool.submit(self._segment, path, at, stop, size, PATIENT_TRIES))
                while coming:
                    sink(coming.popleft().result())
            except BaseException:
                for segment in coming:
                    segment.cancel()
                raise

    def _segment(self, path: str, begin: int, end: int, size: int, tries: int) -> bytearray:
        data = bytearray()
        self._copy(path, begin, end, size, tries, data.extend)
        return data

    def _copy(self, path: str, begin: int, end: int, size: int, tries: int, sink: Sink) -> None:
        """``copy`` over one connection."""
        patience = Patience(f"{self.repo}/{path}", tries, self.stop, self.note)
        at = begin
        while at < end:
            try:
                for data in self._range(path, at, end, size):
                    if self.stop.is_set():
                        raise Stopped
                    sink(data)
                    at += len(data)
                    patience.progressed()
            except httpx2.TransportError as error:
                patience.failed(transport_fault(error))
            except Transient as fault:
                patience.failed(fault)

    def _range(self, path: str, begin: int, end: int, size: int) -> Iterator[bytes]:
        """What one answer gives of [begin, end): all of it, or, of a short answer, its beginning."""
        headers = {"Accept-Encoding": "identity"}
        if (begin, end) != (0, size):
            headers["Range"] = f"bytes={begin}-{end - 1}"
        with self._answer(path, headers) as response:
            left = _announced(response, begin, end, size)
            # In pieces as they come: larger ones would be lost when the connection breaks while one is collected.
            for data in response.iter_raw():
                if len(data) > left:
                    raise Transient("the answer holds more bytes than it announced")
                left -= len(data)
                yield data

    @contextmanager
    def _answer(self, path: str, headers: dict[str, str]) -> Iterator[httpx2.Response]:
        """The successful answer to a GET of a file, its body unread."""
        first = hf_hub_url(self.repo, path, revision=self.commit)
        url = self._signed.get(path, first)
        for _ in range(_REDIRECTS):
            own = _is_hub(url)
            request = (hub_headers() if own else {}) | headers
            try:
                with get_session().stream(
                    "GET", url, headers=request, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, follow_redirects=False
                ) as response:
                    if not response.has_redirect_location:
                        self._check(response, path, own)
                        yield response
                        return
                    url = urljoin(url, response.headers["Location"])
            except OfflineModeIsEnabled as error:
                raise refusal(error, self.repo, path) from None
            except httpx2.UnsupportedProtocol:
                raise InputError(
                    f"{constants.ENDPOINT} is not an address to reach the Hub at", "see HF_ENDPOINT"
                ) from None
            if not _is_hub(url):
                with self._lock:
                    self._signed[path] = url
        raise Transient(f"more than {_REDIRECTS} redirects")

    def _check(self, response: httpx2.Response, path: str, own: bool) -> None:
        status = response.status_code
        if status < 400:
            return
        if not own and status in _EXPIRED:
            with self._lock:
                self._signed.pop(path, None)
            raise Transient(f"{urlsplit(str(response.url)).hostname} answers {status}: the signed address has expired")
        check_status(response, self.repo, path)


def check_status(response: httpx2.Response, repo: str, what: str = "") -> None:
    """Sort an answer of the Hub.

    Raises:
        Transient: a limit or a fault that may pass.
        InputError: a refusal.
    """
    status = response.status_code
    if status in _TRANSIENT:
        raise Transient(f"{urlsplit(str(response.url)).hostname} answers {status}", asked_wait(response.headers))
    try:
        hf_raise_for_status(response)
    except HfHubHTTPError as error:
        raise refusal(error, repo, what) from None


def _announced(response: httpx2.Response, begin: int, end: int, size: int) -> int:
    """Bytes that the body of an answer to a range will have; the range must begin where it was asked to."""
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise Transient("the answer is compressed, against what was asked for")
    if response.status_code == 200 and (begin, end) == (0, size):
        return size
    if response.status_code != 206:
        raise Transient(f"answer {response.status_code} to a range: all of the file, not the bytes asked for")
    said = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if not said:
        raise Transient("a range without Content-Range")
    first, last, whole = map(int, said.groups())
    if first != begin or last >= end or whole != size:
        raise Transient(f"bytes {first}-{last}/{whole} came, {begin}-{end - 1}/{size} were asked for")
    return last + 1 - begin


def _is_hub(url: str) -> bool:
    """Whether the token may be sent there."""
    return _origin(url) in {_origin(host) for host in (constants.ENDPOINT, *_HUB_HOSTS)}


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)
