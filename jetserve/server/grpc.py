"""The gRPC server: JetStream's protocol, health, reflection, TLS and tokens, and which status ends what.

Owns connections. Knows nothing of models, nor of when to stop: `serve` says that.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jetserve.config import ServerConfig
from jetserve.engine.async_engine import AsyncEngine
from jetserve.server import auth, failures, grpc_messages, listen
from jetserve.server.failures import RETRY_AFTER_SECONDS, FailureKind
from jetserve.server.metrics import Protocol
from jetserve.server.observe import Observation, Observer
from jetserve.server.proto import jetstream_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["Orchestrator"].full_name
REQUEST_ID_KEY = "x-request-id"
"""Initial metadata of a call; a client that has received it knows that the engine has taken the request."""
HAND_OVER_SECONDS = 0.3
"""What calls that have arrived are given to get to this server's code, which tells them that it stops."""

_OPEN_TO_ALL = (f"/{SERVICE}/HealthCheck", "/grpc.health.v1.Health/")
_OPTIONS = [
    ("grpc.so_reuseport", 0),  # a second server on a port is refused, rather than given half of its clients
    ("grpc.keepalive_time_ms", 30_000),  # a client that vanished without a word is found out
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # In a flood gRPC would answer calls with CANCELLED, by chance, where this server says why and when to come again.
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 100_000),
    ("grpc.server_max_unrequested_time_in_server", 300),  # seconds
]


_CODES = {
    FailureKind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    FailureKind.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    FailureKind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    FailureKind.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    FailureKind.DEAD: grpc.StatusCode.INTERNAL,
    FailureKind.INTERNAL: grpc.StatusCode.INTERNAL,
}


def _retry_hint(details: str) -> tuple[tuple[str, str | bytes], ...]:
    """As plain metadata, and as google.rpc.RetryInfo in the status that rich clients read."""
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=RETRY_AFTER_SECONDS)))
    code = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    status = status_pb2.Status(code=code, message=details, details=[detail])
    return ("retry-after-ms", str(1000 * RETRY_AFTER_SECONDS)), ("grpc-status-details-bin", status.SerializeToString())


class Orchestrator:
    """The service of `proto/jetstream.proto` over one engine.

    It takes requests as bytes: gRPC would answer those that it cannot parse with UNKNOWN, and log each.
    """

    def __init__(self, engine: AsyncEngine, observer: Observer) -> None:
        self._engine = engine
        self._observer = observer

    def handler(self) -> grpc.GenericRpcHandler:
        """For `Server.add_generic_rpc_handlers`."""
        methods = {
            "Decode": grpc.unary_stream_rpc_method_handler(
                self.decode, response_serializer=pb.DecodeResponse.SerializeToString
            ),
            "HealthCheck": grpc.unary_unary_rpc_method_handler(
                self.health_check, response_serializer=pb.HealthCheckResponse.SerializeToString
            ),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def decode(self, data: bytes, context: "grpc.aio.ServicerContext") -> None:
        """Streams an answer. A client that leaves cancels this coroutine, and so its request in the engine."""
        try:
            request_id = uuid.uuid4().hex
            with self._observer.observe(Protocol.GRPC, request_id) as observation:
                await self._decode(_parse(data), context, observation, request_id)
        except Exception as error:  # noqa: BLE001  (each has a status; the observation has logged it)
            code, details = _CODES[failures.kind_of(error)], failures.message_of(error)
            await context.abort(
                code, details, _retry_hint(details) if code is grpc.StatusCode.RESOURCE_EXHAUSTED else ()
            )

    async def health_check(self, _data: bytes, _context: "grpc.aio.ServicerContext") -> pb.HealthCheckResponse:
        """Whether requests are served."""
        return pb.HealthCheckResponse(is_live=self._engine.is_live)

    async def _decode(
        self,
        message: pb.DecodeRequest,
        context: "grpc.aio.ServicerContext",
        observation: Observation,
        request_id: str,
    ) -> None:
        request = await asyncio.to_thread(  # a long text takes a while to become tokens
            grpc_messages.to_request,
            message,
            self._engine.engine.tokenizer,
            request_id=request_id,
            arrival=observation.arrival,
            seconds_left=context.time_remaining(),
        )
        observation.begin(request.request_id, [request])
        text = grpc_messages.with_text(message)
        async with contextlib.aclosing(self._engine.generate(request)) as outputs:
            await context.send_initial_metadata(((REQUEST_ID_KEY, request.request_id),))
            async for output in outputs:
                observation.take(output)
                if output.text or output.token_ids or output.finished:
                    await context.write(grpc_messages.to_response(output, samples=request.sampling.n, text=text))
                failures.check(output)


def _parse(data: bytes) -> pb.DecodeRequest:
    try:
        return pb.DecodeRequest.FromString(data)
    except DecodeError as error:
        raise ValueError(f"{error}; expected a DecodeRequest, with text in UTF-8") from error


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Lets in calls with the right key, and all that ask after the server's health."""

    def __init__(self, key: str) -> None:
        self._key = key

        async def refuse(_request: Any, context: "grpc.aio.ServicerContext") -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, auth.EXPECTED)

        self._refusal = grpc.unary_unary_rpc_method_handler(refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        if not handler_call_details.method.startswith(_OPEN_TO_ALL):
            found = dict(handler_call_details.invocation_metadata).get("authorization", "")
            if not auth.is_right(found, self._key):
                return self._refusal
        return await continuation(handler_call_details)


class GrpcServer:
    """A server that has its port from the start, so that one in use is known before a model is loaded.

    Made and used on one event loop.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Binds the port.

        Raises:
          ValueError: if there is a key that cannot be one, or a file that the configuration names cannot be used.
          RuntimeError: if the port cannot be had.
        """
        key = auth.key_of(config)
        interceptors = [] if key is None else [KeyInterceptor(key)]
        size = config.max_message_bytes
        limits = [("grpc.max_receive_message_length", size), ("grpc.max_send_message_length", size)]
        self._server = grpc.aio.server(interceptors=interceptors, options=[*_OPTIONS, *limits])
        self._health = health.aio.HealthServicer()
        self.port = self._bind(config)

    def _bind(self, config: ServerConfig) -> int:
        assert config.grpc_port is not None
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"{host}:{config.grpc_port}"
        pair = listen.certificate_and_key(config)
        # gRPC would log lines of its own about an address that cannot be had.
        listen.bind(config.host, config.grpc_port, flag="--grpc_port").close()
        if pair is None:
            return self._server.add_insecure_port(address)
        certificate, key = pair
        return self._server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)]))

    async def start(self, engine: AsyncEngine, observer: Observer) -> None:
        """Takes calls, for `engine` to answer."""
        self._server.add_generic_rpc_handlers((Orchestrator(engine, observer).handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()

    async def say_not_serving(self) -> None:
        """Tells who asks the health service to send new requests elsewhere. Calls are still taken."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def _set_health(self, status: "health_pb2.HealthCheckResponse.ServingStatus") -> None:
        for service in ("", SERVICE):
            await self._health.set(service, status)

    async def stop(self, seconds: float) -> None:
        """Takes no more calls, gives clients up to `seconds` to read what is ready for them, and drops the rest.

        A second call with less time shortens the first one's.
        """
        # gRPC hands calls over one by one, and answers those that it still has with CANCELLED.
        await asyncio.sleep(HAND_OVER_SECONDS)
        await self._server.stop(seconds)
