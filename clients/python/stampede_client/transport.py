"""One request and its answer, and the rules by which requests are repeated."""

from __future__ import annotations

import json
import random
import time
import urllib.request
from dataclasses import dataclass, field
from email.message import Message
from http.client import HTTPException, HTTPResponse
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Type, TypeVar, Union, cast
from urllib.error import HTTPError
from urllib.parse import urlencode

from .errors import NetworkError, OutcomeUnknownError, ProblemError, StampedeError
from .types import read

Item = TypeVar("Item")
Token = Union[str, Callable[[Optional[str]], str], None]


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    """Below the base URL, with its query."""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Optional[Mapping[str, Any]] = None


@dataclass(frozen=True)
class Answer:
    headers: Message
    json: Any


@dataclass(frozen=True)
class Repeats:
    """How to repeat a call."""

    tries: Optional[int] = None
    deadline: Optional[float] = None
    changes: str = ""
    """The call changes something, and its answer has this member: order_id or state.

    After a try without an answer of Stampede, its outcome is unknown.
    """
    key: Optional[str] = None
    also_repeat: str = ""
    """A problem that is worth a repeat in this call, beside those of is_temporary."""
    wait_for_opening: bool = False
    """Wait for the opening of the sale; tries and deadline count from then on."""


def is_temporary(error: BaseException) -> bool:
    """No answer, or one that asks for a repeat of the same request. All other problems are final."""
    if isinstance(error, ProblemError):
        return error.status in (429, 502, 503, 504)
    return isinstance(error, NetworkError)


def _may_have_happened(error: StampedeError) -> bool:
    """The request may have had its effect: no answer of Stampede came back, or one that says so.

    502 and 504 are a proxy's, whatever they say.
    """
    if isinstance(error, ProblemError):
        return error.status in (502, 504) or error.slug in ("", "outcome-unknown")
    return True


def _is_decision(error: StampedeError) -> bool:
    """The answer knows of earlier tries of the same request; a refused token, for example, does not."""
    return (
        isinstance(error, ProblemError)
        and error.slug != ""
        and error.status in (404, 409, 410, 422)
    )


def pause_before(failures: int, error: StampedeError, least: float = 0.0) -> float:
    """How long to wait, in seconds: as the server asks, else longer each time, and at least `least`.

    Random, so that clients spread.
    """
    retry_after = error.retry_after if isinstance(error, ProblemError) else None
    if retry_after is not None:
        return retry_after + random.random() * min(retry_after / 4, 1.0)
    spread = random.random()
    return max(
        (0.5 + spread / 2) * min(0.5 * 2.0 ** (failures - 1), 10.0), least * (1 + spread / 4)
    )


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class Transport:
    """Sends requests. It is safe for use by several threads: each request has its own connection."""

    def __init__(
        self,
        base_url: str,
        token: Token,
        headers: Dict[str, str],
        timeout: float,
        tries: int,
        deadline: float,
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._token = token
        self._headers = headers
        self._timeout = timeout
        self._tries = tries
        self._deadline = deadline
        self._opener = urllib.request.build_opener(_NoRedirects)

    def call(self, request: Request, repeats: Repeats, extra: float = 0.0) -> Answer:
        """Sends a request, and repeats it by the rules until there is an answer."""
        tries = self._tries if repeats.tries is None else repeats.tries
        deadline = self._deadline if repeats.deadline is None else repeats.deadline
        until = time.monotonic() + deadline
        unknown = False
        failures = 0
        while True:
            failures += 1
            try:
                timeout = min(self._timeout + extra, until - time.monotonic())
                answer = self._try_once(request, timeout)
                if repeats.changes and repeats.changes not in answer.json:
                    raise NetworkError("the answer is not Stampede's")
                return answer
            except StampedeError as e:
                error = e
            unsure = _may_have_happened(error)
            unknown = unknown or unsure
            slug = error.slug if isinstance(error, ProblemError) else ""
            pause = pause_before(failures, error)
            again = is_temporary(error) or (unsure and repeats.changes != "")
            final = not again and (slug == "" or slug != repeats.also_repeat)
            if slug == "sale-not-open" and repeats.wait_for_opening:
                # The server's seconds, not opens_at: the clock of this machine may be wrong.
                pause = cast(ProblemError, error).retry_after or 1.0
                until = time.monotonic() + pause + deadline
                failures = 0
            elif final or failures >= tries or time.monotonic() + pause >= until:
                if unknown and repeats.changes and not _is_decision(error):
                    raise OutcomeUnknownError(repeats.key) from error
                raise error
            time.sleep(pause)

    def list(
        self, path: str, name: str, query: Mapping[str, Union[str, int, None]], kind: Type[Item]
    ) -> Iterator[Item]:
        """The members of a list, page after page."""
        parameters = {name: value for name, value in query.items() if value is not None}
        while True:
            page = self.call(Request("GET", f"{path}?{urlencode(parameters)}"), Repeats()).json
            for members in page[name]:
                yield read(kind, members)
            if "next_cursor" not in page:
                return
            parameters["cursor"] = page["next_cursor"]

    def _try_once(self, request: Request, timeout: float) -> Answer:
        with self.open(request, timeout) as response:
            try:
                return Answer(response.headers, dict(json.loads(response.read())))
            except (OSError, HTTPException, TypeError, ValueError) as e:
                raise NetworkError("the answer is incomplete, or not a JSON object") from e

    def open(self, request: Request, timeout: float) -> HTTPResponse:
        """Sends a request and returns its answer with an open body.

        The timeout is for the connection and for each silence after it.
        """
        token = self._token(None) if callable(self._token) else self._token
        try:
            return self._send(request, token, timeout)
        except ProblemError as e:
            # The answer 401 to a token means that it is not valid, or not any more. The request was not processed.
            if e.status != 401 or not callable(self._token):
                raise
        return self._send(request, self._token(token), timeout)

    def _send(self, request: Request, token: Optional[str], timeout: float) -> HTTPResponse:
        headers = {"Accept": "application/json", **self._headers, **request.headers}
        body = None
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        if request.body is not None:
            headers["Content-Type"] = "application/json"
            body = json.dumps(request.body).encode()
        message = urllib.request.Request(
            self._base_url + request.path, body, headers, method=request.method
        )
        try:
            # A timeout of 0 would mean a socket that never waits.
            return cast(HTTPResponse, self._opener.open(message, timeout=max(timeout, 0.001)))
        except HTTPError as e:
            with e:
                raise _read_problem(e) from None
        except (OSError, HTTPException) as e:
            raise NetworkError("no answer from the server") from e


def _read_problem(answer: HTTPError) -> ProblemError:
    try:
        members = json.loads(answer.read())
    except (OSError, HTTPException, ValueError):
        members = None
    try:
        retry_after: Optional[float] = max(float(answer.headers.get("Retry-After", "")), 0.0)
    except ValueError:
        retry_after = None
    return ProblemError(answer.code, members if isinstance(members, dict) else {}, retry_after)
